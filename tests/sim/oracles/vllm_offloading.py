"""Run workloads through vLLM's own scheduler with its own OffloadingConnector, in-process, without a model or a GPU.

    VENV/bin/python vllm_offloading.py MODEL_DIR < workloads.json > steps.json

As ``vllm_scheduler.py``, but for ``config.host_blocks``: the blocks that the connector's host keeps. A transfer is done
when the step that asked for it is delivered. The connector's own worker refuses CPUs; none is needed here.
"""

import functools
import json
import sys
from typing import Any

import vllm_scheduler  # type: ignore[import-not-found]
from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

OFFLOADING = KVTransferConfig(
    kv_connector="OffloadingConnector",
    kv_role="kv_both",
    kv_connector_extra_config={"cpu_bytes_to_use": 1 << 20},
)
vllm_scheduler.VllmConfig = functools.partial(VllmConfig, kv_transfer_config=OFFLOADING)


class Manager(CPUOffloadingManager):  # type: ignore[misc]
    """vLLM's, but blocks that another request of the step stores count as used by both, as with us.

    vLLM's own counts them for the first alone: one of sixty workloads then evicts other blocks.
    """

    def prepare_store(self, keys: Any, req_context: Any) -> Any:
        offered = list(keys)
        prepared = super().prepare_store(offered, req_context)
        if prepared is not None:
            kept = [key for key in offered if self._policy.get(key) is not None]
            self._record_request_cache_access(kept, req_context)
        return prepared


class Run(vllm_scheduler.Run):  # type: ignore[misc]
    """One workload on one scheduler with a connector of so many blocks."""

    def __init__(self, model: ModelConfig, workload: dict[str, Any]) -> None:
        super().__init__(model, workload)
        self.manager = Manager(num_chunks=workload["config"]["host_blocks"])
        self.scheduler.connector.connector_scheduler.manager = self.manager

    def step(self) -> dict[str, Any]:
        output = self.scheduler.schedule()
        scheduled = [
            [name, tokens, self.scheduler.requests[name].num_computed_tokens - tokens]
            for name, tokens in output.num_scheduled_tokens.items()
        ]
        samples = {name: not self.scheduler.requests[name].is_prefill_chunk for name, _, _ in scheduled}
        loads = output.kv_connector_metadata.load_jobs
        self.deliver(output, samples)
        return {
            "scheduled": scheduled,
            "loaded": sorted([load.req_id, len(load.dst_spec.block_ids)] for load in loads.values()),
            "kept": len(self.manager._policy.chunks),
        }

    def deliver(self, output: Any, samples: dict[str, bool]) -> None:
        names = list(output.num_scheduled_tokens)
        tokens = [self.next_tokens(name) if samples[name] else [] for name in names]
        jobs = output.kv_connector_metadata
        done = dict.fromkeys([*jobs.load_jobs, *jobs.store_jobs], 1)
        transfers = KVConnectorOutput(
            finished_recving={job.req_id for job in jobs.load_jobs.values()},
            kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs=done),
        )
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: position for position, name in enumerate(names)},
                sampled_token_ids=tokens,
                kv_connector_output=transfers,
            ),
        )


def main() -> None:
    """Answer the workloads on stdin."""
    workloads = json.load(sys.stdin)
    path = sys.argv[1]
    model = ModelConfig(model=path, tokenizer=path, dtype="bfloat16", max_model_len=4096)
    init_none_hash(sha256)
    json.dump([Run(model, workload).run() for workload in workloads], sys.stdout)


if __name__ == "__main__":
    main()
