"""A run in parts against the run at once: the same records, byte for byte, and memory of what is in flight only."""

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import arrivalorder
from sim.arrivalorder import records_in_parts
from sim.compiled import simulate
from sim.config import EngineConfig
from sim.ending import DECIMALS
from sim.engine import Engine
from sim.kernels.text import MOST_DIGITS, write_arrays
from sim.latency import FrontendModel, FrontendPlacement
from sim.model import Model, make_model
from sim.parts import PartialRun
from sim.prediction import FinishOrder, predicted_records
from sim.workload import Arrival, plan_arrivals
from tests.sim.test_compiled import CONFIGS, NOISE, STEP, load
from tracefile import Meta, Record, RequestId, TraceWriter, encode_record, open_trace


def in_parts(arrivals: list[Arrival], config: EngineConfig, model: Model, seed: int | None, size: int) -> list[Record]:
    """As ``sim run`` writes them, ``size`` arrivals at a time."""
    run, order, written = PartialRun(config, model, seed), FinishOrder(), []
    for start in range(0, max(len(arrivals), 1), size):
        last = start + size >= len(arrivals)
        for ending in run.feed(arrivals[start : start + size], last=last):
            order.add(ending, config.block_size)
        written += order.release(float("inf") if last else run.certain_until_ms - 0.001)
    return written


@settings(max_examples=80, deadline=None)
@given(
    load_seed=st.integers(0, 10**6),
    requests=st.integers(1, 60),
    spacing_ms=st.sampled_from([0.0, 5.0, 30.0, 200.0]),
    config=CONFIGS,
    size=st.sampled_from([1, 3, 10]),
    seed=st.sampled_from([None, 7]),
)
def test_parts_give_the_same_records(  # noqa: PLR0917 - one for each strategy
    load_seed: int, requests: int, spacing_ms: float, config: EngineConfig, size: int, seed: int | None
) -> None:
    placement: FrontendPlacement = "parallel" if load_seed % 2 else "serial"
    model = make_model(STEP, FrontendModel(f0_ms=1.7, f1_ms_per_prompt_token=0.01, placement=placement), config, NOISE)
    records = sorted(load(random.Random(load_seed), requests, spacing_ms), key=lambda record: record.arrival_ms or 0.0)
    arrivals = plan_arrivals(Meta(block_size=4), records, config.block_size)
    whole = simulate(arrivals, config, model, seed=seed)
    expected = [encode_record(record) for record in predicted_records(whole)]
    assert [encode_record(record) for record in in_parts(arrivals, config, model, seed, size)] == expected
    plain = predicted_records(Engine(arrivals, config, model, seed=seed).run())
    assert [encode_record(record) for record in plain] == expected


def test_steps_and_preemptions_are_counted_over_all_parts() -> None:
    config = EngineConfig(num_gpu_blocks=30, block_size=4, max_num_seqs=6, max_num_batched_tokens=16)
    model = make_model(STEP, FrontendModel(f0_ms=1.7, f1_ms_per_prompt_token=0.01), config, NOISE)
    records = sorted(load(random.Random(5), 60, 10.0), key=lambda record: record.arrival_ms or 0.0)
    arrivals = plan_arrivals(Meta(block_size=4), records, 4)
    whole, run = simulate(arrivals, config, model), PartialRun(config, model, None)
    for start in range(0, 60, 7):
        run.feed(arrivals[start : start + 7], last=start + 7 >= 60)
    assert whole.preemptions > 0
    assert (run.preemptions, run.engine_steps) == (whole.preemptions, whole.timeline.engine_steps)


@given(st.lists(st.integers(0, 10**13), max_size=20))
def test_gaps_are_written_as_json_has_them(parts: list[int]) -> None:
    gaps = np.array(parts, np.float64) / 10**DECIMALS
    text, ends = np.empty(MOST_DIGITS * len(gaps) + 2, np.uint8), np.empty(1, np.int64)
    write_arrays(gaps, np.array([0]), np.array([len(gaps)]), text, ends)
    assert text[: ends[0]].tobytes() == msgspec.json.encode(np.round(gaps, DECIMALS).tolist())


def of_a_file(path: Path) -> Iterator[list[str]]:
    with open_trace(path) as reader:
        for part in records_in_parts(reader, path):
            yield [record.request_id for record in part]


@pytest.mark.parametrize("size", [3, 100])
def test_records_come_by_their_arrival_whatever_their_order(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_ms = [5.0, 1.0, 1.0, 9.0, 2.0, 30.0, 20.0, 10.0, 40.0]
    with TraceWriter(tmp_path / "trace.jsonl", Meta(block_size=4)) as writer:
        for number, time_ms in enumerate(times_ms):
            writer.write(Record(request_id=RequestId(f"r{number}"), arrival_ms=time_ms))
    monkeypatch.setattr(arrivalorder, "PART", size)
    parts = list(of_a_file(tmp_path / "trace.jsonl"))
    expected = sorted(range(len(times_ms)), key=lambda number: (times_ms[number], number))
    assert [name for part in parts for name in part] == [f"r{number}" for number in expected]
    assert len(parts) > 1 or size > len(times_ms)
