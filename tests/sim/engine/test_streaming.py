"""A run in parts against the run at once: the same records, byte for byte, and memory of what is in flight only."""

import copy
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine import streaming as parts
from sim.engine.results import DECIMALS, MOST_DIGITS, write_arrays
from sim.engine.run import Tally, roots_of
from sim.engine.run import predicted_records as predicted_in_parts
from sim.engine.streaming import StreamingRun
from sim.latency.modelfile import Model, make_model
from sim.latency.terms import FrontendPlacement
from sim.vllm.config import EngineConfig
from sim.workload import arrivalorder
from sim.workload.arrivalorder import Part, by_session, in_parts
from sim.workload.arrivals import Arrival, Arrivals, BatchPlan, plan_arrivals
from sim.workload.chain import Chains
from tests.sim.engine.test_compiled import CONFIGS, NOISE, STEP, load
from tests.sim.oracles.plain_engine import Engine
from tests.sim.oracles.simulation import columns, predicted_records, simulate
from tracefile import Meta, Record, RequestId, TraceWriter, encode_record, open_trace
from tracefile.records.batches import RecordBatch

FRONTENDS: tuple[FrontendPlacement, ...] = ("parallel", "serial", "shared_core")


def parts_of(arrivals: Arrivals, size: int) -> Iterator[Part]:
    """``size`` at a time, and when the next come."""
    earliest_ms = np.append(arrivals.arrival_ms, np.inf)
    for start in range(0, len(arrivals), size):
        end = min(start + size, len(arrivals))
        yield Part(arrivals.take(np.arange(start, end)), float(earliest_ms[end]))


def written(arrivals: list[Arrival], config: EngineConfig, model: Model, seed: int | None, size: int) -> list[Record]:
    """As ``sim run`` writes them, ``size`` arrivals at a time."""
    run = StreamingRun(config, model, seed)
    return list(predicted_in_parts(parts_of(columns(arrivals), size), run, Tally(), config.block_size))


@settings(max_examples=30, deadline=None)
@given(
    load_seed=st.integers(0, 10**6),
    requests=st.integers(1, 60),
    spacing_ms=st.sampled_from([0.0, 5.0, 30.0, 200.0]),
    config=CONFIGS,
    placement=st.sampled_from(FRONTENDS),
    size=st.sampled_from([1, 3, 10]),
    seed=st.sampled_from([None, 7]),
    room=st.sampled_from([2, 40, parts.FIRST_TOKENS]),
)
def test_parts_give_the_same_records(  # noqa: PLR0917 - one for each strategy
    load_seed: int,
    requests: int,
    spacing_ms: float,
    config: EngineConfig,
    placement: FrontendPlacement,
    size: int,
    seed: int | None,
    room: int,
) -> None:
    model = make_model(
        {**STEP, "frontend_base_ms": 1.7, "frontend_ms_per_prompt_token": 0.01}, config, NOISE, placement=placement
    )
    records = sorted(load(random.Random(load_seed), requests, spacing_ms), key=lambda record: record.arrival_ms or 0.0)
    arrivals = plan_arrivals(Meta(block_size=4), records, config.block_size).objects()
    whole = simulate(arrivals, config, model, seed=seed)
    expected = [encode_record(record) for record in predicted_records(whole)]
    with pytest.MonkeyPatch.context() as patch:  # arenas that are full after a few tokens or steps
        patch.setattr(parts, "FIRST_TOKENS", room)
        patch.setattr(parts, "FIRST_STEPS", room)
        found = [encode_record(record) for record in written(arrivals, config, model, seed, size)]
    assert found == expected
    plain = predicted_records(Engine(arrivals, config, model, seed=seed).run())
    assert [encode_record(record) for record in plain] == expected


def test_steps_and_preemptions_are_counted_over_all_parts() -> None:
    config = EngineConfig(num_gpu_blocks=30, block_size=4, max_num_seqs=6, max_num_batched_tokens=16)
    model = make_model({**STEP, "frontend_base_ms": 1.7, "frontend_ms_per_prompt_token": 0.01}, config, NOISE)
    records = sorted(load(random.Random(5), 60, 10.0), key=lambda record: record.arrival_ms or 0.0)
    arrivals = plan_arrivals(Meta(block_size=4), records, 4).objects()
    whole, run = simulate(arrivals, config, model), StreamingRun(config, model, None)
    for part in parts_of(columns(arrivals), 7):
        for _ in run.feed(*part):
            pass
    assert whole.preemptions > 0
    assert (run.preemptions, run.engine_steps) == (whole.preemptions, whole.timeline.engine_steps)


@given(st.lists(st.integers(0, 10**13), max_size=20))
def test_gaps_are_written_as_json_has_them(parts: list[int]) -> None:
    gaps = np.array(parts, np.float64) / 10**DECIMALS
    text, ends = np.empty(MOST_DIGITS * len(gaps) + 2, np.uint8), np.empty(1, np.int64)
    write_arrays(gaps, np.array([0]), np.array([len(gaps)]), text, ends)
    assert text[: ends[0]].tobytes() == msgspec.json.encode(np.round(gaps, DECIMALS).tolist())


def of_a_file(path: Path) -> Iterator[Part]:
    with open_trace(path) as reader:
        plan = BatchPlan(Chains(reader.meta), path)
        batches, order = roots_of(reader, path)
        yield from in_parts(plan.every(batches), order)


@pytest.mark.parametrize("size", [3, 100])
def test_records_come_by_their_arrival_whatever_their_order(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_ms = [5.0, 1.0, 1.0, 9.0, 2.0, 30.0, 20.0, 10.0, 40.0]
    with TraceWriter(tmp_path / "trace.jsonl", Meta(block_size=4)) as writer:
        for number, time_ms in enumerate(times_ms):
            writer.write(Record(request_id=RequestId(f"r{number}"), arrival_ms=time_ms))
    monkeypatch.setattr("sim.engine.run.arrivalorder", arrivalorder)  # a late module keeps names that it has found
    monkeypatch.setattr(arrivalorder, "PART", size)
    monkeypatch.setattr("tracefile.records.batches.BATCH", 2)
    found = list(of_a_file(tmp_path / "trace.jsonl"))
    expected = sorted(range(len(times_ms)), key=lambda number: (times_ms[number], number))
    assert [name for part in found for name in part.arrivals.ids] == [f"r{number}" for number in expected]
    assert [number for part in found for number in part.arrivals.numbers.tolist()] == list(range(len(times_ms)))
    assert len(found) > 1 or size > len(times_ms)
    for part, following in pairwise([*found, None]):
        assert part is not None
        assert part.until_ms == (np.inf if following is None else following.arrivals.arrival_ms[0])


def test_what_is_held_follows_what_is_in_flight() -> None:
    config = EngineConfig(num_gpu_blocks=30, block_size=4, max_num_seqs=6, max_num_batched_tokens=16)
    model = make_model({**STEP, "frontend_base_ms": 1.7, "frontend_ms_per_prompt_token": 0.01}, config, NOISE)
    records = sorted(load(random.Random(3), 300, 1000.0), key=lambda record: record.arrival_ms or 0.0)
    run, held = StreamingRun(config, model, None), []
    for part in parts_of(plan_arrivals(Meta(block_size=4), records, 4), 5):
        held += [len(run._arrivals or ()) + sum(map(len, run._pending)) for _ in run.feed(*part)]
    assert max(held) < 20  # a part, and the few that a second of spacing leaves in flight


SESSIONS = st.tuples(st.integers(0, 10**6), st.integers(2, 40), st.sampled_from([0.0, 5.0, 200.0]))


@settings(max_examples=40, deadline=None)
@given(made=SESSIONS, config=CONFIGS, placement=st.sampled_from(FRONTENDS), size=st.sampled_from([1, 3, 10]))
def test_sessions_in_parts_give_the_same_records(
    made: tuple[int, int, float], config: EngineConfig, placement: FrontendPlacement, size: int
) -> None:
    model = make_model(
        {**STEP, "frontend_base_ms": 1.7, "frontend_ms_per_prompt_token": 0.01}, config, NOISE, placement=placement
    )
    records = load(random.Random(made[0]), *made[1:])
    order = by_session([RecordBatch(records)], Path("trace"))
    in_order = [records[place] for place in np.argsort(order.numbers).tolist()]
    arrivals = plan_arrivals(Meta(block_size=4), in_order, config.block_size, replay_sessions=True).objects()
    expected = [encode_record(record) for record in predicted_records(simulate(arrivals, config, model, seed=7))]
    plan = BatchPlan(Chains(Meta(block_size=4), config.block_size), Path("trace"))
    own = [copy.copy(record) for record in records]
    batches = [RecordBatch(own[start : start + 4]) for start in range(0, len(own), 4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivalorder, "PART", size)
        found = in_parts(plan.every(batches), order)
        written = list(predicted_in_parts(found, StreamingRun(config, model, 7), Tally(), config.block_size))
    assert [encode_record(record) for record in written] == expected
