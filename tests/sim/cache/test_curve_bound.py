"""``sim curve`` as a bound: no simulated and no captured engine hits more than its maximum."""

import itertools
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.cache.hitcurve import HitCurve, hit_curve
from sim.cache.curve import read_accesses
from sim.latency.modelfile import make_model
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import plan_arrivals
from sim.workload.chain import Chains, tokens_computed
from tests.sim.oracles.arrival import objects
from tests.sim.oracles.sequential import compiled_hits
from tests.sim.oracles.simulation import simulate
from tracefile.files.reading import load_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.schema import BlockHash, Meta, Record, RequestId

CAPTURES = Path(__file__).parents[3] / "data" / "captures"
META = Meta(block_size=4)
STEP = {"t0_ms": 4.3, "per_prefill_token_ms": 0.13, "per_decode_ms": 0.99, "frontend_base_ms": 1.7}


def load(rng: random.Random, requests: int, spacing_ms: float) -> list[Record]:
    """Chains that branch anywhere, in prompts and in outputs; prompts that end with a full block; conversations."""
    records: list[Record] = []
    fresh = itertools.count(1)
    for number in range(requests):
        prompt, output = rng.choice([8, 16, rng.randrange(1, 60)]), rng.randrange(1, 40)
        full = (prompt + output - 1) // 4
        chain: list[BlockHash] = []
        if records and rng.random() < 0.7:
            earlier = rng.choice(records)
            complete = [*(earlier.block_hashes or ()), *(earlier.output_block_hashes or ())]
            chain = complete[: min(rng.randrange(len(complete) + 1), full)]
        chain += [BlockHash(next(fresh)) for _ in range(full - len(chain))]
        records.append(
            Record(
                request_id=RequestId(f"r{number}"),
                arrival_ms=float(number) * spacing_ms,
                prompt_tokens=prompt,
                output_tokens=output,
                block_hashes=chain[: prompt // 4],
                output_block_hashes=chain[prompt // 4 :] if rng.random() < 0.8 else None,
            )
        )
    return records


def curve_of(folder: Path, records: list[Record], block_size: int = 4) -> HitCurve:
    path = folder / "trace.jsonl"
    with TraceWriter(path, META, overwrite=True) as writer:
        for record in records:
            writer.write(record)
    return hit_curve(read_accesses(path, block_size))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.sampled_from([4, 8]))
def test_sequential_vllm_pool_never_exceeds_the_curve(
    tmp_path_factory: pytest.TempPathFactory, seed: int, requests: int, block_size: int
) -> None:
    records = load(random.Random(seed), requests, 1.0)
    curve = curve_of(tmp_path_factory.mktemp("pool"), records, block_size)
    unlimited = compiled_hits(records, Chains(META, block_size), None)
    assert unlimited.hit_blocks == curve.max_hit_blocks
    # A request larger than the pool is refused and touches no block, which a single recency order cannot express.
    largest = max(-(-tokens_computed(record) // block_size) for record in records)
    for usable in (largest, largest + 1, largest + 3, 2 * largest, 4 * largest):
        result = compiled_hits(records, Chains(META, block_size), usable)
        assert result.hit_blocks <= curve.hits_at(usable) <= curve.max_hit_blocks


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    requests=st.integers(1, 30),
    spacing_ms=st.sampled_from([0.0, 5.0, 30.0, 200.0]),
    config=st.builds(
        EngineConfig,
        num_gpu_blocks=st.sampled_from([27, 40, 101, 1000]),
        block_size=st.sampled_from([4, 8]),
        max_num_seqs=st.sampled_from([1, 3, 64]),
        max_num_batched_tokens=st.sampled_from([64, 128]),
        async_scheduling=st.booleans(),
    ),
)
def test_fcfs_engine_never_exceeds_the_maximum(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    requests: int,
    spacing_ms: float,
    config: EngineConfig,
) -> None:
    """With several requests at once, chunked prefill and preemption; hits count at a request's first admission."""
    records = load(random.Random(seed), requests, spacing_ms)
    runs = simulate(objects(plan_arrivals(META, records, config.block_size)), config, make_model(STEP, config)).runs
    # The order of the engine's queue: behind parallel API servers a short prompt may overtake a long one.
    entered = [run.arrival_ms if run.entry_ms is None else run.entry_ms for run in runs]
    records = [
        msgspec.structs.replace(run.arrival.record, arrival_ms=at) for run, at in zip(runs, entered, strict=True)
    ]
    curve = curve_of(tmp_path_factory.mktemp("engine"), records, config.block_size)
    hit_blocks = sum((run.request.cached_tokens or 0) for run in runs if run.request) // config.block_size
    assert hit_blocks <= curve.max_hit_blocks
    if curve.max_hit_blocks:
        usable = config.num_gpu_blocks - 1
        assert hit_blocks <= curve.bound_blocks[min(usable, len(curve.bound_blocks)) - 1]
        assert (curve.hit_blocks <= curve.bound_blocks).all()
        assert curve.bound_blocks[-1] <= curve.max_hit_blocks


@pytest.mark.parametrize(
    ("capture", "cached", "at_captured_size", "most"),
    [
        ("128x2/session-fast", 1_175_488, 1_175_488, 1_175_488),
        ("128x2/session-fast-small", 1_155_616, 1_157_376, 1_175_488),
        ("256x4/session-slow-small", 204_768, 204_768, 204_768),
        ("128x2/poisson-slow", 216_256, 216_256, 216_256),
    ],
)
def test_captured_vllm_never_exceeds_the_curve(capture: str, cached: int, at_captured_size: int, most: int) -> None:
    """Cached tokens as vLLM reported them; ``small``: 700 and 520 blocks, which evict."""
    path = CAPTURES / f"{capture}.jsonl.zst"
    meta, records = load_trace(path)
    assert meta.engine is not None
    assert meta.engine.num_gpu_blocks is not None
    curve = hit_curve(read_accesses(path))
    assert curve.block_size == meta.engine.block_size == 32
    assert sum(record.cached_tokens or 0 for record in records) == cached
    assert curve.hits_at(meta.engine.num_gpu_blocks - 1) * 32 == at_captured_size
    assert curve.max_hit_blocks * 32 == most
    assert cached <= at_captured_size <= most
