"""Fits on ordinary traffic: what it does not identify is borrowed from a model of the same engine, and marked."""

from dataclasses import replace
from math import exp, log
from pathlib import Path

import msgspec
import pytest

from report.compare.headline import doubts
from report.compare.results import Forecast
from sim.__main__ import main
from sim.fit.fit import describe_fit
from sim.fit.fitting import FitConfig, fit_traces
from sim.forecast.saturation import beyond_fit, borrowed_parameters, open_parameters, run_point
from sim.latency.modelfile import Model, load_model, save_model
from sim.workload.arrivals import plan_arrivals
from tests.sim.fit import knownengine
from tracefile import InputError, load_trace

SLOWER = 1.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lender of two designed captures, and sessions of the same engine a tenth slower, with few outputs at once."""
    folder, engine = tmp_path_factory.mktemp("borrowing"), knownengine.known_engine()
    calibrations = [
        knownengine.capture(folder / f"calibration-{seed}.jsonl", knownengine.calibration(seed), engine, seed)
        for seed in (1, 2)
    ]
    knownengine.capture(folder / "sessions.jsonl", knownengine.sessions(7), knownengine.scaled(engine, SLOWER), seed=7)
    config = FitConfig(tuple(calibrations), folder / "m.json", {}, frontend="parallel", extra_terms=(), bootstrap=100)
    save_model(fit_traces(config).model, folder / "lender.json")
    return folder


def fitted(folder: Path, *, borrows: bool) -> Model:
    lender = folder / "lender.json" if borrows else None
    frontend = None if borrows else "parallel"
    return fit_traces(
        FitConfig(
            (folder / "sessions.jsonl",),
            folder / "m.json",
            {},
            bootstrap=100,
            borrow_from=lender,
            frontend=frontend,  # type: ignore[arg-type]
            extra_terms=None if borrows else (),
        )
    ).model


def test_borrowed_costs_are_the_lenders_at_the_pace_and_the_others_hold_the_truth(folder: Path) -> None:
    lender, model = load_model(folder / "lender.json"), fitted(folder, borrows=True)
    truth, pace = knownengine.known_engine().parameters, model.diagnostics["borrowed"]["pace"]["factor"]
    assert abs(log(pace / SLOWER)) < 0.03
    borrowed = {name for name, one in model.parameters.items() if one.borrowed}
    assert borrowed >= {"per_prefill_token_ms", "per_decode_ms", "per_kv_token_ms", "per_repeated_kv_token_ms"}
    assert borrowed == set(model.diagnostics["borrowed"]["parameters"])
    for name, one in model.parameters.items():
        lent = lender.parameters[name]
        assert one.low is not None
        assert one.high is not None
        if one.borrowed:
            paced = one.value / lent.value
            if name.startswith("per_"):
                assert paced == pytest.approx(pace)
            else:  # the API server has a core of its own
                assert abs(log(paced / SLOWER)) < 0.05
                assert "the captures' API server" in (one.note or "")
            assert one.low < (lent.low or 0.0) * paced < (lent.high or 0.0) * paced < one.high
            assert not one.identified
            assert "borrowed from lender.json" in (one.note or "")
        elif name in truth:
            near = abs(one.value / (SLOWER * truth[name].value) - 1.0) <= 0.05
            assert near or one.low <= SLOWER * truth[name].value <= one.high, name
    assert "  (borrowed)" in describe_fit(model)
    assert "pace: steps of these captures took 1." in describe_fit(model)
    spread = model.noise.frontend_log_ratio[model.noise.levels.index(0.9)]
    assert f"{100 * (exp(spread) - 1):+.0f}%; another capture" in describe_fit(model)  # a share of time, not a log
    assert model.fitted_on[1:] == lender.fitted_on
    assert all(len(draw) == len(model.parameters) for draw in model.draws)


def test_a_forecast_that_depends_on_borrowed_costs_says_so(folder: Path) -> None:
    model, own = fitted(folder, borrows=True), fitted(folder, borrows=False)
    path = folder / "calibration-1.jsonl"
    arrivals = plan_arrivals(*load_trace(path), model.engine.block_size, path=str(path))
    point = run_point(arrivals, model.engine, model)
    said = list(borrowed_parameters(model, point))
    assert {"per_prefill_token_ms", "per_decode_ms"} <= {one.partition(" ")[0] for one in said}
    assert "of the step time" in said[0]
    assert any("is borrowed (" in one for one in open_parameters(model, point))
    facts = Forecast(
        model_digest="",
        members=1,
        seed=0,
        pacing="recorded",
        cold_prompts=False,
        settings={},
        utilization=0.5,
        saturated=False,
        preempted=0,
        borrowed=said,
    )
    (sentence,) = doubts(facts)
    assert sentence.startswith("the captures of the fit do not identify, and the model borrowed, per_prefill_token_ms")
    # The lender's captures had prompts and contexts as long; sessions alone did not.
    assert not any("tokens behind" in one for one in beyond_fit(point, model))
    assert any("tokens behind" in one for one in beyond_fit(point, own))


def test_without_a_lender_open_costs_are_drawn_towards_their_defaults(folder: Path) -> None:
    model = fitted(folder, borrows=False)
    decode = model.parameters["per_decode_ms"]
    assert not decode.identified
    assert not decode.borrowed
    assert (decode.note or "").endswith("; drawn towards 0.1 × t0_ms")
    assert "  (not identified)" in describe_fit(model)


def test_prompts_of_one_size_are_enough_beside_a_lender(folder: Path) -> None:
    meta, records = load_trace(folder / "sessions.jsonl")
    path = folder / "one-size.jsonl"
    knownengine.write(
        path, meta, [one for one in records if 64 <= (one.prompt_tokens or 0) - (one.cached_tokens or 0) < 128]
    )
    config = FitConfig((path,), folder / "m.json", {}, bootstrap=20)
    with pytest.raises(InputError, match="uncached prompts are all of about one size"):
        fit_traces(config)
    found = fit_traces(replace(config, borrow_from=folder / "lender.json")).model.parameters["per_prefill_token_ms"]
    assert found.borrowed
    assert "cold prompts are all of" in (found.note or "")


@pytest.mark.parametrize(
    ("step_tokens", "terms", "message"),
    [
        (
            4096,
            [],
            "of other settings .max_num_batched_tokens 2048, fitted under 4096.; expected",
        ),
        (2048, ["prefill_step_ms"], "--term, --api-server: given with --borrow-from"),
    ],
)
def test_a_lender_of_another_engine_or_shape_is_refused(
    folder: Path, tmp_path: Path, step_tokens: int, terms: list[str], message: str
) -> None:
    lender = load_model(folder / "lender.json")
    save_model(
        msgspec.structs.replace(lender, engine=replace(lender.engine, max_num_batched_tokens=step_tokens)),
        tmp_path / "l.json",
    )
    (tmp_path / "shape.toml").write_text(f"[sim.calibrate]\nterm = {terms}\n")
    argv = ["calibrate", str(folder / "sessions.jsonl"), "--borrow-from", str(tmp_path / "l.json")]
    argv += ["--config", str(tmp_path / "shape.toml")]
    with pytest.raises(InputError, match=message):
        main([*argv, "-o", str(tmp_path / "m.json")])
