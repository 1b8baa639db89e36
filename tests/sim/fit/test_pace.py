"""Pace of an engine that is known: its steps over the model's, and the model at that pace."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sim.__main__ import main
from sim.fit.pace import Pace, capture_steps, describe_pace, measure_pace, with_pace
from sim.latency.modelfile import Model, default_model, load_model, save_model
from sim.workload.arrivals import plan_arrivals
from tests.sim.oracles.arrival import objects
from tests.sim.oracles.plain_engine import Engine
from tests.sim.oracles.simulation import predicted_records
from tracefile.files.reading import load_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Meta, Record, RequestId

BLOCK_SIZE = 32
OVERLAPPING_MS = [400.0 * number if number < 12 else 20_000.0 for number in range(32)]
"""Twelve requests that overlap, and twenty at once."""


def capture(path: Path, model: Model, arrivals_ms: Sequence[float] = OVERLAPPING_MS) -> Path:
    """Requests, and their capture on an engine of this model without noise."""
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
    simulation = Engine(objects(plan_arrivals(meta, records, BLOCK_SIZE)), model.engine, model).run()
    with TraceWriter(path, meta) as writer:
        for record in predicted_records(simulation):
            writer.write(record)
    return path


def slower(model: Model, factor: float) -> Model:
    costs = {name: msgspec.structs.replace(cost, value=cost.value * factor) for name, cost in model.parameters.items()}
    return msgspec.structs.replace(model, parameters=costs)


def test_pace_of_a_slower_engine(tmp_path: Path) -> None:
    model = default_model()
    path = capture(tmp_path / "c.jsonl", slower(model, 1.25))
    meta, records = load_trace(path)
    pace = measure_pace(capture_steps(meta, records, model, str(path)), model, str(path))
    assert pace.factor == pytest.approx(1.25, rel=1e-3)
    assert pace.log_sd < 0.01
    paced = with_pace(msgspec.structs.replace(model, draws=[[1.0] * len(model.parameters)]), pace)
    assert paced.costs == pytest.approx(np.array(model.costs) * pace.factor)
    assert paced.draws == [[pytest.approx(pace.factor)] * len(model.parameters)]
    assert (paced.drift_log_sd, paced.drift_freedom) == (round(pace.log_sd, 6), pace.freedom)
    assert "took 1.250 of the model's time (95 % interval 1.2" in describe_pace(pace, "c.jsonl", model)


@pytest.mark.parametrize(
    ("factor", "log_sd", "drift_log_sd", "verdict"),
    [
        (1.04, 0.01, 0.0, "the model expects 0.95 to 1.05: it holds"),
        (1.2, 0.01, 0.0, "it has drifted: forecast with the scaled one, or fit again"),
        (1 / 1.2, 0.01, 0.0, "it has drifted: forecast with the scaled one, or fit again"),
        (1.2, 0.01, 0.1, "the model expects 0.82 to 1.22: it holds"),  # exp(1.96 x 0.1)
        (1.04, 0.5, 0.0, "too uncertain to say"),
    ],
)
def test_model_fits_within_the_variation_of_captures(
    factor: float, log_sd: float, drift_log_sd: float, verdict: str
) -> None:
    model = msgspec.structs.replace(default_model(), drift_log_sd=drift_log_sd)
    assert describe_pace(Pace(factor, log_sd, 7, 800), "c.jsonl", model).endswith(verdict)


def test_scaling_trace_cannot_validate_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = default_model(), capture(tmp_path / "c.jsonl", slower(default_model(), 0.8))
    save_model(model, tmp_path / "m.json")
    argv = [
        "calibrate",
        "--pace-from",
        str(path),
        "--latency-model",
        str(tmp_path / "m.json"),
        "-o",
        str(tmp_path / "n.json"),
    ]
    assert main(argv) == 0
    assert "pace: steps of c.jsonl took 0.800 of the model's time" in capsys.readouterr().out
    scaled = load_model(tmp_path / "n.json")
    assert scaled.parameters["t0_ms"].value == pytest.approx(0.8 * model.parameters["t0_ms"].value, rel=1e-3)
    assert scaled.diagnostics["pace"]["freedom"] == scaled.drift_freedom
    with pytest.raises(InputError, match=r"c\.jsonl: the model was fitted on this trace"):
        main(["validate", str(path), "--latency-model", str(tmp_path / "n.json")])


def test_capture_of_several_engines_is_rejected(tmp_path: Path) -> None:
    meta, records = load_trace(capture(tmp_path / "c.jsonl", default_model()))
    for number, record in enumerate(records):
        record.upstream = f"engine-{number % 2}"
    with TraceWriter(tmp_path / "two.jsonl", meta) as writer:
        for record in records:
            writer.write(record)
    message = r"two\.jsonl: requests of 2 upstreams; expected a capture of one engine"
    with pytest.raises(InputError, match=message):
        main(["calibrate", str(tmp_path / "two.jsonl"), "-o", str(tmp_path / "model.json"), "--num-gpu-blocks", "800"])
    with pytest.raises(InputError, match=message):
        capture_steps(meta, records, default_model(), "two.jsonl")
