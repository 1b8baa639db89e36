"""The pool and scheduler, in the readable oracle and in the product, against vLLM's: every step.

Synchronous and asynchronous, with and without prefix caching, cache salts, and log probabilities of prompts.
"""

import json
import os
import random
import subprocess
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from sim.vllm.config import EngineConfig
from tests.sim.oracles import stepped_scheduler as stepped
from tests.sim.oracles.integrity import check_readable
from tests.sim.oracles.readable.hybrid import HybridScheduler, make_scheduler
from tests.sim.oracles.readable.pool import BlockPool
from tests.sim.oracles.readable.request import Request
from tests.sim.oracles.readable.scheduler import Scheduler, Step
from tests.sim.oracles.stepped_scheduler import Content, SteppedScheduler

STOP_TOKEN = 2
SCRIPT = Path(__file__).parents[1] / "oracles" / "vllm_scheduler.py"

Workload = dict[str, Any]


def make_workload(seed: int) -> Workload:
    """Prompts that share prefixes, some continuing an earlier output, on a pool too small for all of them at once."""
    rng = random.Random(seed)
    block_size = rng.choice([16, 32])
    max_num_seqs = rng.choice([2, 4, 8])
    config: dict[str, Any] = {
        "num_gpu_blocks": rng.choice([12, 20, 33, 65]),
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": rng.choice([16, 48, 128, 256]),
        "enable_prefix_caching": rng.random() > 0.1,
        "async_scheduling": seed % 2 == 1,
    }
    most_tokens = (config["num_gpu_blocks"] - 1) * block_size
    prefix = random_tokens(rng, most_tokens)
    requests: list[dict[str, Any]] = []
    for number in range(rng.randrange(8, 24)):
        requests.append(make_request(rng, number, requests, prefix, most_tokens))
    if rng.random() < 0.5:  # ends that are a matter of length only
        for request in requests:
            request["max_tokens"] = len(request["output"])
            request["output"] = [token if token != STOP_TOKEN else 10 for token in request["output"]]
    return {"config": config, "requests": requests}


def make_request(
    rng: random.Random, number: int, earlier: list[dict[str, Any]], prefix: list[int], most_tokens: int
) -> dict[str, Any]:
    if earlier and rng.random() < 0.4:
        parent = rng.choice(earlier)
        shared = parent["prompt"] + parent["output"]
    else:
        shared = prefix[: rng.randrange(0, len(prefix) // 2)]
    prompt = (shared + random_tokens(rng, rng.choice([0, 1, 5, 40])))[: most_tokens * 2 // 3] or [10]
    most_output = max(min(most_tokens - len(prompt), 100), 1)
    output = random_tokens(rng, rng.randrange(1, most_output + 1))
    stops = len(output) < most_output and rng.random() < 0.4
    if stops:
        output[-1] = STOP_TOKEN
    step = rng.randrange(0, 60)
    return {
        "id": f"r{number}",
        "step": step,
        "arrival": step + number / 1000,
        "salt": rng.choice([None, None, None, "pepper"]),
        "prompt": prompt,
        "output": output,
        "max_tokens": len(output) + (rng.randrange(1, most_output - len(output) + 1) if stops else 0),
        "abort_step": rng.randrange(0, 90) if rng.random() < 0.1 else None,
        "prompt_logprobs": rng.random() < 0.15,
    }


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 1000) for _ in range(count)]


def our_steps(workload: Workload) -> list[dict[str, Any]]:
    """The same workload on our scheduler, in the output format of ``vllm_scheduler.py``, with block contents."""
    config = our_config(workload)
    scheduler, keys = make_scheduler(config), Keys()
    requests = {spec["id"]: our_request(spec, config.block_size, keys) for spec in workload["requests"]}
    pending = deque(sorted(workload["requests"], key=lambda spec: spec["step"]))
    in_flight: deque[Step] = deque()
    steps: list[dict[str, Any]] = []
    while pending or scheduler.has_work:
        while pending and pending[0]["step"] <= len(steps):
            scheduler.add(requests[pending.popleft()["id"]])
        for spec in workload["requests"]:
            if spec["abort_step"] == len(steps) and spec["step"] <= len(steps):
                scheduler.abort(requests[spec["id"]])
        before = scheduler.stats.requests, scheduler.stats.query_tokens, scheduler.stats.hit_tokens
        step = scheduler.schedule()
        after = scheduler.stats.requests, scheduler.stats.query_tokens, scheduler.stats.hit_tokens
        tables = {share.request.request_id: tables_of(scheduler, share.request) for share in step.scheduled}
        free_scheduled, contents_scheduled = scheduler.pool.free_order(), free_contents(scheduler.pool)
        check_readable(scheduler)
        in_flight.append(step)
        if len(in_flight) >= (2 if config.async_scheduling else 1):
            scheduler.finish_step(in_flight.popleft())
        check_readable(scheduler)
        steps.append(
            {
                "scheduled": [[s.request.request_id, s.num_tokens, s.depth] for s in step.scheduled],
                "preempted": sorted(request.request_id for request in step.preempted),
                "free_scheduled": free_scheduled,
                "free_finished": scheduler.pool.free_order(),
                "cached": [b for b in range(config.num_gpu_blocks) if scheduler.pool.key_of(b) is not None],
                "stats": [new - old for new, old in zip(after, before, strict=True)],
                **({"tables": tables} if config.kv_groups else {}),
                "contents_scheduled": contents_scheduled,
                "contents_finished": free_contents(scheduler.pool),
                "holders": holders(scheduler.pool),
            }
        )
    return steps


def product_steps(workload: Workload) -> list[dict[str, Any]]:
    """The same on the product's scheduler, step by step. Blocks are identified by their contents."""
    config, keys = our_config(workload), Keys()
    specs = workload["requests"]
    scheduler = SteppedScheduler(config, [our_request(spec, config.block_size, keys) for spec in specs])
    pending = deque(sorted(range(len(specs)), key=lambda position: specs[position]["step"]))
    in_flight: deque[int] = deque()
    steps: list[dict[str, Any]] = []
    while pending or scheduler.has_work:
        while pending and specs[pending[0]]["step"] <= len(steps):
            scheduler.add(pending.popleft())
        for position, spec in enumerate(specs):
            if spec["abort_step"] == len(steps) and spec["step"] <= len(steps):
                scheduler.abort(position)
        before = scheduler.stats()
        slot = len(steps) % 2 if config.async_scheduling else 0
        scheduler.schedule(slot)
        described = {
            "scheduled": [[specs[position]["id"], tokens, depth] for position, tokens, depth in scheduler.shares(slot)],
            "preempted": sorted(specs[position]["id"] for position in scheduler.preempted(slot)),
            "contents_scheduled": stepped.free_contents(scheduler.pool),
            "stats": [new - old for new, old in zip(scheduler.stats(), before, strict=True)],
        }
        in_flight.append(slot)
        if len(in_flight) >= (2 if config.async_scheduling else 1):
            scheduler.finish_step(in_flight.popleft())
        steps.append(
            {
                **described,
                "contents_finished": stepped.free_contents(scheduler.pool),
                "holders": stepped.holders(scheduler.pool),
            }
        )
    return steps


def tables_of(scheduler: Scheduler, request: Request) -> list[list[int]]:
    """Block ids of ``request`` by group."""
    return scheduler.cache.tables(request) if isinstance(scheduler, HybridScheduler) else [request.blocks]


def contents(pool: BlockPool) -> dict[int, Content]:
    """By cached block: its key, and its position among the blocks of that key."""
    result: dict[int, Content] = {}
    for block in range(1, pool.num_gpu_blocks):
        key = pool.key_of(block)
        if key is not None and block not in result:
            result |= {twin: (key, position) for position, twin in enumerate(twins(pool, key))}
    return result


def twins(pool: BlockPool, key: int) -> list[int]:
    """Blocks cached under ``key``, the one that lookups get first."""
    line = pool._cached[key]
    return list(line) if isinstance(line, dict) else [line]


def free_contents(pool: BlockPool) -> list[Content | None]:
    held = contents(pool)
    return [held.get(block) for block in pool.free_order()]


def holders(pool: BlockPool) -> dict[Content, int]:
    return {content: pool._references[block] for block, content in contents(pool).items()}


def without_ids(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps without block ids: a pool by segments does not identify blocks."""
    names = ("scheduled", "preempted", "contents_scheduled", "stats", "contents_finished", "holders")
    return [{name: step[name] for name in names} for step in steps]


def our_config(workload: Workload) -> EngineConfig:
    config = {name: value for name, value in workload["config"].items() if name != "hybrid"}
    return EngineConfig(max_model_len=4096, **config)


class Keys(dict[tuple[object, ...], int]):
    """Chains of plain numbers: equal numbers for equal salts and tokens up to a block's end."""

    def chain(self, spec: dict[str, Any], block_size: int) -> list[int]:
        tokens = spec["prompt"] + spec["output"]
        full = (len(tokens) - 1) // block_size
        return [self.setdefault((spec["salt"], *tokens[: (i + 1) * block_size]), len(self)) for i in range(full)]


def our_request(spec: dict[str, Any], block_size: int, keys: Keys) -> Request:
    return Request(
        spec["id"],
        len(spec["prompt"]),
        len(spec["output"]),
        keys.chain(spec, block_size),
        arrival_ms=spec["arrival"],
        max_tokens=spec["max_tokens"],
        prompt_logprobs=spec["prompt_logprobs"],
    )


def vllms_steps(script: Path, workloads: list[Workload]) -> list[Any]:
    """Steps of each workload on vLLM's own scheduler, driven by a script in its environment; skips without one."""
    python, model = os.environ.get("KVTAPE_VLLM_PYTHON"), os.environ.get("KVTAPE_VLLM_MODEL")
    if not python or not model:
        pytest.skip("KVTAPE_VLLM_PYTHON and KVTAPE_VLLM_MODEL do not name a vLLM and a model directory")
    process = subprocess.run(
        [python, str(script), model],
        input=json.dumps(workloads),
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    result: list[Any] = json.loads(process.stdout)
    return result


@pytest.mark.vllm
def test_every_step_equals_vllm() -> None:
    count = int(os.environ.get("KVTAPE_VLLM_WORKLOADS", "100"))
    workloads = [make_workload(seed) for seed in range(count)]
    results = vllms_steps(SCRIPT, workloads)
    preemptions = hits = 0
    for seed, (workload, expected) in enumerate(zip(workloads, results, strict=True)):
        steps = our_steps(workload)
        for number, (our_step, their_step) in enumerate(zip(steps, expected, strict=False)):
            assert {name: our_step[name] for name in their_step} == their_step, f"workload {seed}, step {number}"
        assert len(steps) == len(expected), f"workload {seed}"
        assert product_steps(workload) == without_ids(steps), f"workload {seed}, by segments"
        preemptions += sum(len(step["preempted"]) for step in steps)
        hits += sum(step["stats"][2] for step in steps)
    # Agreement on workloads without pressure or sharing would prove little.
    assert preemptions > count
    assert hits > 100 * count


def test_workloads_finish_on_our_scheduler() -> None:
    # What the differential test compares must itself come to an end, here too where no vLLM is.
    for seed in range(12):
        assert our_steps(make_workload(seed))[-1]["scheduled"] is not None


def test_every_step_equals_the_readable_scheduler() -> None:
    for seed in range(16):
        workload = make_workload(seed)
        assert product_steps(workload) == without_ids(our_steps(workload)), f"workload {seed}"
