"""Times of a capture's steps by their kinds, of engines that are known."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from scripts.fidelity.steps import step_times
from sim.latency.modelfile import Model, Parameter, default_model
from sim.workload.arrivals import plan_arrivals
from tests.sim.oracles.plain_engine import Engine
from tests.sim.oracles.simulation import predicted_records
from tracefile import BlockHash, Meta, Record, RequestId, TraceWriter

BLOCK_SIZE = 32


OVERLAPPING_MS = [400.0 * number if number < 12 else 20_000.0 for number in range(32)]
"""Twelve requests that overlap, and twenty at once."""


def capture(path: Path, model: Model, arrivals_ms: Sequence[float] = OVERLAPPING_MS) -> Path:
    """Requests, and what an engine of this model makes of them without noise."""
    meta, records = Meta(source="tap", block_size=BLOCK_SIZE), []
    for number, arrival_ms in enumerate(arrivals_ms):
        hashes = [BlockHash(100 * number + block) for block in range(10)]
        records.append(
            Record(
                request_id=RequestId(f"r{number}"),
                arrival_ms=arrival_ms,
                stream=True,
                prompt_tokens=5 * BLOCK_SIZE,
                output_tokens=90,
                block_hashes=hashes[:5],
                output_block_hashes=hashes[5:7],
            )
        )
    simulation = Engine(plan_arrivals(meta, records, BLOCK_SIZE).objects(), model.engine, model).run()
    with TraceWriter(path, meta) as writer:
        for record in predicted_records(simulation):
            writer.write(record)
    return path


def test_an_engine_keeps_the_times_of_its_own_model(tmp_path: Path) -> None:
    model = default_model()
    found = step_times(capture(tmp_path / "c.jsonl", model), model)
    assert found.decodes == {"1–3": pytest.approx(1.0, abs=1e-3), "16+": pytest.approx(1.0, abs=1e-3)}


def test_a_model_that_overcharges_for_answers_at_once_is_told_from_a_slow_engine(tmp_path: Path) -> None:
    model = default_model()
    found = step_times(capture(tmp_path / "c.jsonl", model), dearer(model, "per_decode_ms", 1.0))
    assert found.decodes["16+"] < 0.7
    assert found.decodes["16+"] < found.decodes["1–3"] - 0.1


def test_prefills_are_told_by_the_rest_before_them_and_the_decodes_beside_them(tmp_path: Path) -> None:
    """Pairs 20 ms apart, every 3 s: the first finds the engine at rest, the second an output being generated."""
    model = default_model()
    arrivals_ms = [3000.0 * (number // 2) + 20.0 * (number % 2) for number in range(60)]
    trace = capture(tmp_path / "c.jsonl", model, arrivals_ms)
    even = {"alone, after a rest": pytest.approx(1.0, abs=1e-3), "beside decodes": pytest.approx(1.0, abs=1e-3)}
    assert step_times(trace, model).prefills == even
    rested = step_times(trace, dearer(model, "rested_step_ms", 20.0)).prefills
    assert rested["alone, after a rest"] < 0.7
    assert rested["beside decodes"] == pytest.approx(1.0, abs=1e-3)


def dearer(model: Model, term: str, by: float) -> Model:
    cost = model.parameters.get(term, Parameter(value=0.0, unit="ms"))
    changed = msgspec.structs.replace(cost, value=cost.value + by)
    return msgspec.structs.replace(model, parameters={**model.parameters, term: changed})
