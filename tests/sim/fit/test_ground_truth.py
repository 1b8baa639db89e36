"""``loadgen --pattern calibration`` on engines of known parameters, in virtual time: the fit finds them again."""

import shlex
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadgen.loadflags import parse_config
from sim.fit.fitting import FitConfig, fit_traces
from sim.latency.modelfile import Model, Parameter, default_model
from sim.latency.terms import FrontendPlacement
from tests.sim import planned


def learn(
    folder: Path,
    truth: Model,
    *,
    seed: int,
    spread: float,
    flags: str = "",
    delay_ms: float = 0.0,
    extra_terms: tuple[str, ...] | None = None,
) -> Model:
    """The load sent to an engine of ``truth``, captured and fitted."""
    argv = f"--url http://x -o t --pattern calibration --seed {seed} {flags}"
    records = planned.capture(parse_config(shlex.split(argv)), truth, spread=spread, delay_ms=delay_ms)
    path = planned.write(folder / f"{len(list(folder.iterdir()))}.jsonl", records, truth)
    config = FitConfig((path,), folder / "model.json", {}, frontend=truth.frontend_placement, extra_terms=extra_terms)
    return fit_traces(config).model


def widths(model: Model) -> np.ndarray:
    """Each parameter's interval, as a share of its value."""
    return np.array([((term.high or 0.0) - (term.low or 0.0)) / term.value for term in model.parameters.values()])


def test_parameters_are_within_5_percent_or_interval(tmp_path: Path) -> None:
    truth = default_model()
    fitted = learn(tmp_path, truth, seed=1, spread=0.05, flags="--number 78")
    for name, parameter in truth.parameters.items():
        got = fitted.parameters[name]
        assert got.identified
        near = abs(got.value / parameter.value - 1.0) <= 0.05
        assert near or (got.low or 0.0) <= parameter.value <= (got.high or 0.0), name


def test_single_round_identifies_a_noise_free_engine(tmp_path: Path) -> None:
    slow = default_model()
    faster = {
        name: msgspec.structs.replace(cost, value=cost.value / 10) if name.startswith(("t0", "per_")) else cost
        for name, cost in slow.parameters.items()
    }
    truth = msgspec.structs.replace(slow, parameters=faster)
    fitted = learn(tmp_path, truth, seed=2, spread=0.0, flags="--number 78")
    for name, parameter in truth.parameters.items():
        assert fitted.parameters[name].value == pytest.approx(parameter.value, rel=0.01), name


@pytest.mark.parametrize("placement", ["parallel", "shared_core"])
def test_delivery_term_is_fitted(tmp_path: Path, placement: FrontendPlacement) -> None:
    """No flag selects the term: it is selected because it predicts held-out data."""
    delivery = Parameter(value=0.0004, unit="ms/token")
    model = default_model()
    parameters = {**model.parameters, "delivery_ms_per_prompt_token": delivery}
    truth = msgspec.structs.replace(model, parameters=parameters, frontend_placement=placement)
    fitted = learn(tmp_path, truth, seed=4, spread=0.05)
    # Reads that it holds up are left out, the more the longer it takes: it is found too small rather than too large.
    assert fitted.parameters["delivery_ms_per_prompt_token"].value == pytest.approx(0.0004, rel=0.3)
    for name, parameter in model.parameters.items():
        got = fitted.parameters[name]
        near = abs(got.value / parameter.value - 1.0) <= 0.1
        low, high = got.low or 0.0, got.high or 0.0
        slack = (high - low) / 4  # one in twenty of 95 % misses
        assert near or low - slack <= parameter.value <= high + slack, name


def test_repeated_reads_and_idle_terms_are_fitted(tmp_path: Path) -> None:
    """A block that several outputs read costs a quarter as much again; a rest costs a step, and its prompt's past."""
    model = default_model()
    costs = {"per_kv_token_ms": 2e-4, "per_repeated_kv_token_ms": 5e-5}
    costs |= {"rested_step_ms": 2.0, "per_rested_depth_ms": 1.2e-3}
    added = {name: Parameter(value=value, unit="ms") for name, value in costs.items()}
    truth = msgspec.structs.replace(model, parameters={**model.parameters, **added})
    fitted = learn(tmp_path, truth, seed=7, spread=0.05)
    for name, value in costs.items():
        got = fitted.parameters[name]
        assert got.identified, name
        slack = ((got.high or 0.0) - (got.low or 0.0)) / 4  # one in twenty of 95 % misses
        assert (got.low or 0.0) - slack <= value <= (got.high or 0.0) + slack, (name, got)


def test_noisy_steps_widen_intervals(tmp_path: Path) -> None:
    """Steps four times as uneven: intervals and noise grow with them."""
    truth = default_model()
    even, uneven = (learn(tmp_path, truth, seed=3, spread=spread, flags="--number 78") for spread in (0.05, 0.2))
    assert np.median(widths(uneven) / widths(even)) > 2
    inner = [model.noise.levels.index(level) for model in (even,) for level in (0.1, 0.9)]
    noise = [np.ptp(np.array(model.noise.step_log_ratio)[:, inner], axis=1).max() for model in (even, uneven)]
    assert noise[1] > 2 * noise[0]


def test_late_responses_widen_api_server_noise(tmp_path: Path) -> None:
    """Up to 12 ms, where the front end needs 7: no parameter describes the delay, so it is noise."""
    truth = default_model()
    prompt, late = (
        learn(tmp_path, truth, seed=5, spread=0.05, flags="--number 78", delay_ms=delay_ms) for delay_ms in (0.0, 12.0)
    )
    assert np.ptp(late.noise.frontend_log_ratio) > 2 * np.ptp(prompt.noise.frontend_log_ratio)


def test_unmodelled_work_widens_step_noise(tmp_path: Path) -> None:
    """An engine that needs 20 ms for every chunk, fitted without a chunk term."""
    model = default_model()
    chunk = Parameter(value=20.0, unit="ms/chunk")
    truth = msgspec.structs.replace(model, parameters={**model.parameters, "per_prefill_chunk_ms": chunk})
    blind, extended = (
        learn(tmp_path, truth, seed=6, spread=0.05, flags="--number 78", extra_terms=terms)
        for terms in ((), ("per_prefill_chunk_ms",))
    )
    assert extended.parameters["per_prefill_chunk_ms"].value == pytest.approx(20.0, rel=0.1)
    widest = [np.ptp(np.array(model.noise.step_log_ratio)[:, 3:-3], axis=1).max() for model in (blind, extended)]
    assert widest[0] > 2 * widest[1]
