"""Our KV cache of several groups against vLLM's own: every step of random workloads, every block of every request.

Groups of full attention, windows, chunks, recurrent states and rings, with blocks of their own, sparse and dense
retention, match units, and the last block that speculative decoding drops.
"""

import hashlib
import json
import math
import os
import random
from typing import Any

import pytest

from tests.sim.oracles.readable.hybrid import HybridScheduler
from tests.sim.vllm.test_vllm_oracle import (
    SCRIPT,
    Workload,
    make_request,
    our_config,
    our_steps,
    random_tokens,
    vllms_steps,
)

Group = dict[str, Any]
RECORDED = {
    7: "3f32eca1dfbac797",
    17: "55748c24b5adc946",
    30: "7b917c898f6903ad",
    70: "d3b00d5ee6509ed1",
    80: "869ed095c5c372e9",
    93: "870dc4fd6225ca9d",
    104: "f2a754c834a3c62c",
    105: "8c04c20e723ea334",
    115: "51c7a8855701a090",
    119: "5f44c2c930da9413",
    120: "af799ab80e0a1693",
    175: "81bde9dbb211f531",
    181: "aa3c51dd6a797154",
}
"""By seed: digest of the steps of vLLM 0.32.0, so that ours are held to them where no vLLM is."""


def make_groups(rng: random.Random) -> list[Group]:
    """Groups of current models, some with separate block sizes."""
    size = rng.choice([8, 16])
    span = rng.choice([9, 16, 33, 40, 100])
    full: Group = {"kind": rng.choice(["full", "full", "mla"]), "block_size": size}
    window: Group = {"kind": "window", "block_size": size, "span": span}
    chunk: Group = {"kind": "chunk", "block_size": size, "span": size * rng.choice([2, 4])}
    state: Group = {"kind": rng.choice(["mamba", "mamba2"]), "block_size": size * rng.choice([1, 2, 3])}
    families = [
        [full, *[window] * rng.choice([1, 2, 3])],
        [full, window, {**window, "span": span + 20}],
        [{**full, "block_size": size * rng.choice([2, 3])}, window],
        [full, {**window, "block_size": size * 2}],
        [window],
        [full, chunk],
        [chunk],
        [{**full, "block_size": state["block_size"]}, *[state] * rng.choice([1, 2])],
        [{**full, "block_size": state["block_size"]}, *[state] * rng.choice([1, 3])],
        [full, state],
        [full, window, state],
        [state],
        [full, full, window],
    ]
    return list(rng.choice(families))


def make_hybrid(seed: int) -> Workload:
    """A workload as that of one group, over random groups."""
    rng = random.Random(1000 + seed)
    groups = make_groups(rng)
    cached = [group["block_size"] for group in groups]
    complete, unit = math.lcm(*(group["block_size"] for group in groups)), math.gcd(*cached)
    if len(groups) > 1 and unit > 4 and rng.random() < 0.4:
        unit //= 2
    chunks = any(group["kind"] == "chunk" for group in groups)
    states = any(group["kind"].startswith("mamba") for group in groups)
    sparse = states or any(group["kind"] == "window" for group in groups)
    caching = rng.random() > 0.05
    retain = rng.choice([0, 0, None, complete, 2 * complete]) if sparse and caching else 0
    eagle = not chunks and rng.random() < 0.3
    if eagle and rng.random() < 0.5 and not groups[0]["kind"].startswith("mamba"):
        groups[0] = {**groups[0], "draft": True}
    budget = rng.choice([16, 48, 128, 256])
    config: dict[str, Any] = {
        "num_gpu_blocks": rng.choice([40, 65, 90]) + 8 * len(groups),
        "block_size": unit,
        "max_num_seqs": rng.choice([2, 4, 8]),
        "max_num_batched_tokens": budget,
        "enable_prefix_caching": caching,
        "async_scheduling": seed % 2 == 1,
    }
    config["hybrid"] = {"groups": groups, "retain": retain, "eagle": eagle}
    config["kv_groups"] = kv_groups(groups, unit, retain, eagle)
    workload: Workload = {"config": config, "requests": []}
    most = most_tokens(workload)
    prefix = random_tokens(rng, most)
    for number in range(rng.randrange(8, 20)):
        workload["requests"].append(make_request(rng, number, workload["requests"], prefix, most))
    return workload


def kv_groups(groups: list[Group], unit: int, retain: int | None, eagle: bool) -> str:
    words = []
    for group in groups:
        inside = [str(group.get("span"))] * ("span" in group) + ["draft"] * group.get("draft", False)
        words.append(f"{group['kind']}{'(' + '/'.join(inside) + ')' if inside else ''}:{group['block_size']}")
    words += [f"match={unit}"] * (len(groups) > 1) + ["eagle"] * eagle
    return "+".join([*words, f"retain={'none' if retain is None else retain}"])


def most_tokens(workload: Workload) -> int:
    """Tokens of the longest request that surely fits the pool alone."""
    scheduler = HybridScheduler(our_config(workload))
    usable = workload["config"]["num_gpu_blocks"] - 1
    return next(most for most in range(500, 0, -1) if scheduler.cache.most_blocks(most) <= usable)


def digest(steps: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(steps, sort_keys=True).encode()).hexdigest()[:16]


def test_steps_equal_recorded_vllm() -> None:
    names = ("scheduled", "preempted", "free_scheduled", "free_finished", "cached", "stats", "tables")
    ours = {seed: [{name: step[name] for name in names} for step in our_steps(make_hybrid(seed))] for seed in RECORDED}
    assert {seed: digest(steps) for seed, steps in ours.items()} == RECORDED
    assert sum(len(step["preempted"]) for steps in ours.values() for step in steps) > 20
    assert sum(step["stats"][2] for steps in ours.values() for step in steps) > 5_000


@pytest.mark.vllm
def test_every_step_equals_vllm() -> None:
    count = int(os.environ.get("KVTAPE_VLLM_WORKLOADS", "200"))
    workloads = [make_hybrid(seed) for seed in range(count)]
    answers = vllms_steps(SCRIPT, workloads)
    preemptions = hits = 0
    for seed, (workload, theirs) in enumerate(zip(workloads, answers, strict=True)):
        ours = our_steps(workload)
        for number, (our_step, their_step) in enumerate(zip(ours, theirs, strict=False)):
            assert {name: our_step[name] for name in their_step} == their_step, f"workload {seed}, step {number}"
        assert len(ours) == len(theirs), f"workload {seed}"
        assert digest(theirs) == RECORDED.get(seed, digest(theirs))
        preemptions += sum(len(step["preempted"]) for step in ours)
        hits += sum(step["stats"][2] for step in ours)
    assert preemptions > count / 4
    assert hits > 50 * count
