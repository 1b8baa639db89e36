"""An engine's pace during a capture, of engines that are known."""

from pathlib import Path

import msgspec
import pytest

from scripts.fidelity.pace import pace
from sim.latency.modelfile import Model, default_model
from sim.workload.arrivals import plan_arrivals
from tests.sim.oracles.plain_engine import Engine
from tests.sim.oracles.simulation import predicted_records
from tracefile import BlockHash, Meta, Record, RequestId, TraceWriter

BLOCK_SIZE = 32


def capture(path: Path, model: Model) -> Path:
    """Twelve requests that overlap, twenty at once, and what an engine of this model makes of them without noise."""
    meta, records = Meta(source="tap", block_size=BLOCK_SIZE), []
    for number in range(32):
        arrival_ms = 400.0 * number if number < 12 else 20_000.0
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


def test_an_engine_keeps_the_pace_of_its_own_model(tmp_path: Path) -> None:
    model = default_model()
    found = pace(capture(tmp_path / "c.jsonl", model), model)
    assert found.steps == pytest.approx(1.0, abs=1e-3)
    assert found.decodes == {"1–3": pytest.approx(1.0, abs=1e-3), "16+": pytest.approx(1.0, abs=1e-3)}


def test_a_model_that_overcharges_for_answers_at_once_is_told_from_a_slow_engine(tmp_path: Path) -> None:
    model = default_model()
    trace = capture(tmp_path / "c.jsonl", model)
    dear = model.parameters["per_decode_ms"]
    per_decode = msgspec.structs.replace(dear, value=dear.value + 1.0)
    found = pace(trace, msgspec.structs.replace(model, parameters=model.parameters | {"per_decode_ms": per_decode}))
    assert found.decodes["16+"] < 0.7
    assert found.decodes["16+"] < found.decodes["1–3"] - 0.1
