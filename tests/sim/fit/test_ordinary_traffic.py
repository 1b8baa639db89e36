"""Fits on ordinary traffic: unidentified terms are regularized towards defaults and marked."""

from pathlib import Path

import pytest

from sim.fit.fitting import FitConfig, fit_traces
from sim.forecast.calibrate import describe_fit
from sim.forecast.saturation import beyond_fit, open_parameters, run_point
from sim.latency.modelfile import Model
from sim.workload.arrivals import plan_arrivals
from tests.sim.fit import synthetic_engine
from tracefile.files.reading import load_trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A designed capture, and sessions of the same engine with few outputs at once."""
    folder, engine = tmp_path_factory.mktemp("ordinary"), synthetic_engine.reported_engine()
    synthetic_engine.capture(folder / "calibration-1.jsonl", synthetic_engine.calibration(1), engine, 1)
    synthetic_engine.capture(folder / "sessions.jsonl", synthetic_engine.sessions(7), engine, seed=7)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    traces = (folder / "sessions.jsonl",)
    return fit_traces(
        FitConfig(traces, folder / "m.json", {}, bootstrap=100, frontend="parallel", extra_terms=())
    ).model


def test_unidentified_terms_are_regularized(model: Model) -> None:
    decode = model.parameters["per_decode_ms"]
    assert not decode.identified
    assert (decode.note or "").endswith("; drawn towards 0.1 × t0_ms")
    assert "  (not identified)" in "".join(describe_fit(model))


def test_forecast_with_unidentified_terms_gives_a_warning(folder: Path, model: Model) -> None:
    path = folder / "calibration-1.jsonl"
    arrivals = plan_arrivals(*load_trace(path), model.engine.block_size, path=str(path))
    point = run_point(arrivals, model.engine, model)
    assert any("per_decode_ms is not identified (" in warning for warning in open_parameters(model, point))
    # The designed capture had prompts and contexts as long; sessions alone did not.
    assert any("tokens behind" in warning for warning in beyond_fit(point, model))
