"""Our tier of host memory against vLLM's own OffloadingConnector: every step of many random workloads."""

import os
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from sim.engine.deployment import Deployment
from sim.vllm.config import EngineConfig
from tests.sim.oracles.stepped_scheduler import SteppedScheduler
from tests.sim.vllm.test_vllm_oracle import Keys, Workload, make_workload, our_request, vllms_steps

SCRIPT = Path(__file__).parents[1] / "oracles" / "vllm_offloading.py"
MOST_STEPS = 5000


def make_tiered(seed: int) -> Workload:
    """A synchronous workload whose requests all end by their length, and a host that may be full."""
    workload = make_workload(2 * seed)
    for request in workload["requests"]:
        request["max_tokens"], request["abort_step"] = len(request["output"]), None
        request["output"] = [token + 10 for token in request["output"]]
    config = workload["config"]
    config |= {"host_blocks": (40, 80, 300)[seed % 3], "enable_prefix_caching": True, "async_scheduling": False}
    return workload


def stepped(workload: Workload) -> list[dict[str, Any]]:
    """The workload on our scheduler, in the words of ``vllm_offloading.py``; a step is a millisecond."""
    settings = dict(workload["config"])
    host_blocks = settings.pop("host_blocks")
    config = EngineConfig(max_model_len=4096, **settings)
    deployed = Deployment(host_blocks=host_blocks, kv_bytes_per_token=1, host_gb_per_s=1e12, host_latency_ms=0.0)
    specs, keys = workload["requests"], Keys()
    scheduler = SteppedScheduler(config, [our_request(spec, config.block_size, keys) for spec in specs], deployed)
    pending = deque(sorted(range(len(specs)), key=lambda position: specs[position]["step"]))
    steps: list[dict[str, Any]] = []
    while (pending or scheduler.has_work) and len(steps) < MOST_STEPS:
        while pending and specs[pending[0]]["step"] <= len(steps):
            scheduler.add(pending.popleft())
        offloading = scheduler.scheduler.offloading
        assert offloading is not None
        offloading.begin_step(len(steps))
        scheduler.schedule(0)
        loading = scheduler.loading
        steps.append(
            {
                "scheduled": [[specs[position]["id"], *share] for position, *share in scheduler.shares(0)],
                "loaded": sorted([specs[position]["id"], scheduler.loaded_blocks(position)] for position in loading),
                "kept": len(offloading.host.blocks),
            }
        )
        scheduler.finish_step(0)
        for position in loading:
            scheduler.requeue_loaded(position)
    return steps


@pytest.mark.vllm
def test_every_step_equals_vllm() -> None:
    count = int(os.environ.get("KVTAPE_VLLM_WORKLOADS", "100"))
    workloads = [make_tiered(seed) for seed in range(count)]
    answers = vllms_steps(SCRIPT, workloads)
    loaded = 0
    for seed, (workload, theirs) in enumerate(zip(workloads, answers, strict=True)):
        ours = stepped(workload)
        for number, (our_step, their_step) in enumerate(zip(ours, theirs, strict=False)):
            assert our_step == their_step, f"workload {seed}, step {number}"
        assert len(ours) == len(theirs), f"workload {seed}"
        loaded += sum(blocks for step in ours for _, blocks in step["loaded"])
    assert loaded > 5 * count


def test_workloads_finish_on_our_scheduler() -> None:
    for seed in range(6):
        assert stepped(make_tiered(seed))
