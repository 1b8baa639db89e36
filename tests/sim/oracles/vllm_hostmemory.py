"""Host memory for vLLM's OffloadingConnector on its CPU backend: an ``OffloadingSpec`` out of vLLM's tree.

vLLM's own worker copies on a GPU's streams and refuses CPUs; this one copies between two tensors, at once. Lookups,
stores and evictions are vLLM's. The folder of this file is on PYTHONPATH of a server with ``--kv-transfer-config`` and
``{"spec_module_path": "vllm_hostmemory", "spec_name": "HostMemorySpec", "host_blocks": 96}`` in its extra settings.
"""

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostMemorySpec(CPUOffloadingSpec):  # type: ignore[misc]
    """``host_blocks`` blocks of the pool's size."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_chunks = self.extra_config["host_blocks"]

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return CopyingWorker([cache.tensor for cache in kv_caches.tensors], self.num_chunks)


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """Rows of ``pool`` tensors and of the host's, one a block; a transfer is done when it is submitted."""

    def __init__(self, pool: list[torch.Tensor], num_blocks: int) -> None:
        self._pool = pool
        self._host = [torch.empty((num_blocks, layer.shape[1]), dtype=layer.dtype) for layer in pool]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._pool, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._host, src_spec, self._pool, dst_spec)

    def _copy(self, job_id: int, sources: Any, source: Any, targets: Any, target: Any) -> bool:
        rows, into = (torch.as_tensor(spec.block_ids, dtype=torch.long) for spec in (source, target))
        for source_layer, other in zip(sources, targets, strict=True):
            other[into] = source_layer[rows]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: no transfer is left."""
