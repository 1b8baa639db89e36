"""Run workloads through vLLM's own Scheduler and KVCacheManager, in-process, with neither a model nor a GPU.

    VENV/bin/python vllm_scheduler.py MODEL_DIR < workloads.json > steps.json

Needs vLLM (tried with 0.32.0, CPU build) and nothing of this project: tests run it under vLLM's own Python and compare
what every step did. A workload is ``{"config": {...}, "requests": [{"id", "step", "prompt", "output", "max_tokens",
"abort_step", "arrival", "salt", "prompt_logprobs"}]}`` with token ids; a request comes before the step it
names. The sampled tokens are the given ``output``.
"""

import json
import math
import os
import sys
from collections import deque
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

STOP_TOKEN = 2
MOST_STEPS = 5000


def make_scheduler(model: ModelConfig, config: dict[str, Any]) -> Any:
    """A scheduler with one full-attention group over the wanted number of blocks."""
    block_size, blocks = config["block_size"], config["num_gpu_blocks"]
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=config["enable_prefix_caching"])
    cache.num_gpu_blocks = blocks
    scheduling = SchedulerConfig(
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_model_len=model.max_model_len,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=config["async_scheduling"],
    )
    vllm = VllmConfig(model_config=model, cache_config=cache, scheduler_config=scheduling)
    vllm.scheduler_config.async_scheduling = config["async_scheduling"]  # as on a GPU: the CPU's platform turns it off
    hybrid = config.get("hybrid") or {"groups": [{"kind": "full", "block_size": block_size}], "retain": None}
    states = [group["block_size"] for group in hybrid["groups"] if group["kind"].startswith("mamba")]
    if states:
        cache.mamba_cache_mode = "align" if config["enable_prefix_caching"] else "none"
        cache.block_size = cache.mamba_block_size = states[0]
    specs = [make_spec(group, model, config["enable_prefix_caching"]) for group in hybrid["groups"]]
    groups = [
        KVCacheGroupSpec([f"layer{position}"], spec, is_eagle_group=group.get("draft", False))
        for position, (group, spec) in enumerate(zip(hybrid["groups"], specs, strict=True))
    ]
    cached = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=hybrid["retain"],
    )
    complete = math.lcm(*(spec.block_size for spec in specs))
    scheduler = (AsyncScheduler if config["async_scheduling"] else Scheduler)(
        vllm_config=vllm,
        kv_cache_config=cached,
        structured_output_manager=StructuredOutputManager(vllm),
        block_size=complete,
        hash_block_size=block_size if config["enable_prefix_caching"] else complete,
        log_stats=True,
    )
    if hybrid.get("eagle"):  # the last block's drop alone, without drafts
        scheduler.use_eagle_block_drop = True
        scheduler.kv_cache_manager = KVCacheManager(
            kv_cache_config=cached,
            max_model_len=scheduler.max_model_len,
            scheduler_block_size=complete,
            hash_block_size=block_size if config["enable_prefix_caching"] else complete,
            max_in_flight_tokens=vllm.max_in_flight_tokens,
            enable_caching=config["enable_prefix_caching"],
            use_eagle=True,
            num_prefill_lookahead=1,
            log_stats=True,
        )
        coordinator = scheduler.kv_cache_manager.coordinator
        scheduler.mamba_partial_cache_hit = (
            scheduler.need_mamba_block_aligned_split
            and scheduler.hash_block_size < scheduler.block_size
            and coordinator.enable_partial_hash_hits
        )
    return scheduler


def make_spec(group: dict[str, Any], model: ModelConfig, caching: bool) -> Any:
    """A KV cache group's spec; its bytes do not matter here."""
    kind, size = group["kind"], group["block_size"]
    attention = {"block_size": size, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    if kind == "window":
        return SlidingWindowSpec(**attention, sliding_window=group["span"])
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=group["span"])
    if kind.startswith("mamba"):
        inside = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1} if kind == "mamba2" else {}
        return MambaSpec(
            block_size=size if caching else model.max_model_len,
            shapes=((1, 64),),
            dtypes=(torch.bfloat16,),
            mamba_cache_mode="align" if caching else "none",
            **inside,
        )
    spec = {"full": FullAttentionSpec, "mla": MLAAttentionSpec}[kind]
    return spec(**attention)


def make_request(spec: dict[str, Any], hasher: Any) -> Any:
    """A vLLM request that stops at its recorded output, by length or by the stop token."""
    sampling = SamplingParams(
        max_tokens=spec["max_tokens"],
        ignore_eos=True,
        stop_token_ids=[STOP_TOKEN],
        prompt_logprobs=0 if spec["prompt_logprobs"] else None,
    )
    return Request(
        spec["id"],
        spec["prompt"],
        sampling,
        None,
        arrival_time=spec["arrival"],
        cache_salt=spec["salt"],
        block_hasher=hasher,
    )


class Run:
    """A workload on a scheduler: steps in flight, and a record of every step."""

    def __init__(self, model: ModelConfig, workload: dict[str, Any]) -> None:
        config = workload["config"]
        self.scheduler = make_scheduler(model, config)
        block_size = config["block_size"]
        self.hasher = get_request_block_hasher(block_size, sha256) if config["enable_prefix_caching"] else None
        self.hybrid = "hybrid" in config
        self.depth = 2 if config["async_scheduling"] else 1
        self.specs = {spec["id"]: spec for spec in workload["requests"]}
        self.pending = deque(sorted(workload["requests"], key=lambda spec: spec["step"]))
        self.in_flight: deque[tuple[Any, dict[str, bool]]] = deque()
        self.steps: list[dict[str, Any]] = []

    def run(self) -> list[dict[str, Any]]:
        """Step until nothing is left; every step's state as plain data."""
        while (self.pending or self.scheduler.has_unfinished_requests()) and len(self.steps) < MOST_STEPS:
            number = len(self.steps)
            while self.pending and self.pending[0]["step"] <= number:
                self.scheduler.add_request(make_request(self.pending.popleft(), self.hasher))
            for spec in self.specs.values():
                if spec["abort_step"] == number:
                    self.scheduler.finish_requests(spec["id"], RequestStatus.FINISHED_ABORTED)
            self.steps.append(self.step())
        return self.steps

    def step(self) -> dict[str, Any]:
        """Schedule once; deliver the oldest step's tokens when as many are in flight as the engine allows."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        scheduled = [
            [name, tokens, scheduler.requests[name].num_computed_tokens - tokens]
            for name, tokens in output.num_scheduled_tokens.items()
        ]
        samples = {name: not scheduler.requests[name].is_prefill_chunk for name, _, _ in scheduled}
        after_schedule = self.free_order()
        tables = {name: self.tables(name) for name, _, _ in scheduled} if self.hybrid else None
        stats = self.pop_stats()
        self.in_flight.append((output, samples))
        if len(self.in_flight) >= self.depth:
            self.deliver(*self.in_flight.popleft())
        return {
            "scheduled": scheduled,
            "preempted": sorted(output.preempted_req_ids or ()),
            "free_scheduled": after_schedule,
            "free_finished": self.free_order(),
            "cached": self.cached_blocks(),
            "stats": stats,
            **({"tables": tables} if self.hybrid else {}),
        }

    def deliver(self, output: Any, samples: dict[str, bool]) -> None:
        names = list(output.num_scheduled_tokens)
        tokens = [self.next_tokens(name) if samples[name] else [] for name in names]
        index = {name: position for position, name in enumerate(names)}
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=tokens)
        )

    def next_tokens(self, name: str) -> list[int]:
        request = self.scheduler.requests.get(name)
        return [self.specs[name]["output"][len(request.output_token_ids)]] if request else [0]

    def tables(self, name: str) -> list[list[int]]:
        return [list(ids) for ids in self.scheduler.kv_cache_manager.get_block_ids(name)]

    def free_order(self) -> list[int]:
        queue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        return [block.block_id for block in queue.get_all_free_blocks()]

    def cached_blocks(self) -> list[int]:
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        return [block.block_id for block in blocks if block.block_hash is not None]

    def pop_stats(self) -> list[int]:
        # Before update_from_output, which removes them for its report.
        stats = self.scheduler.kv_cache_manager.make_prefix_cache_stats()
        if stats is None:
            return [0, 0, 0]
        return [stats.requests, stats.queries, stats.hits]


def main() -> None:
    """Answer the workloads on stdin."""
    workloads = json.load(sys.stdin)
    path = sys.argv[1]
    model = ModelConfig(model=path, tokenizer=path, dtype="bfloat16", max_model_len=4096)
    init_none_hash(sha256)
    json.dump([Run(model, workload).run() for workload in workloads], sys.stdout)


if __name__ == "__main__":
    main()
