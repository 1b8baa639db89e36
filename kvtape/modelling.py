"""The latency model from Python: fitted to captures, and asked what another cache, rate or setting would do."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sim.fit.fitting import FitConfig, fit_traces
from sim.forecast.points import ForecastConfig
from sim.forecast.results import ForecastGrid
from sim.forecast.scenarios import AS_CAPTURED, Scenario, checked_members
from sim.forecast.whatif import WhatIf, forecast_scenarios
from sim.latency.modelfile import Model, save_model
from sim.latency.terms import FrontendPlacement
from sim.vllm.config import EngineConfig
from tracefile.records.errors import InputError
from tracefile.storage.output import MODEL, check_output

SETTINGS = tuple(field.name for field in fields(EngineConfig))


def fit_model(
    traces: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    bootstrap: int = 400,
    seed: int = 0,
    terms: Sequence[str] | None = None,
    api_server: FrontendPlacement | None = None,
    **settings: Any,
) -> Model:
    """Fit a latency model to captures of one engine, write it to ``output`` as model.json, and return it.

    Parameters in the units that each names. ``bootstrap``: resamples of sessions, 0: no intervals. ``terms``: costs
    beyond the default ones; None: those that improve forecasts. ``api_server``: ``parallel``, ``serial``,
    ``shared_core``; None: the best. ``settings``: the engine's, if traces lack them. Raises InputError.
    """
    _check_settings(settings)
    if bootstrap < 0:
        raise InputError(f"bootstrap: {bootstrap}; expected 0 or more")
    paths, to = tuple(Path(trace) for trace in traces), Path(output)
    check_output(to, MODEL, paths, "output")
    extra = None if terms is None else tuple(terms)
    config = FitConfig(paths, to, settings, bootstrap, seed, frontend=api_server, extra_terms=extra)
    model = fit_traces(config).model
    save_model(model, to)
    return model


def forecast(
    trace: str | os.PathLike[str],
    model: str | os.PathLike[str],
    scenarios: Sequence[Scenario] = (),
    *,
    base: Scenario = AS_CAPTURED,
    members: int = 32,
    seed: int = 0,
) -> ForecastGrid:
    """Forecast a capture as it was and under each scenario; ``points`` has the measured load first.

    ``model``: a model.json not fitted on this trace. Times in ms, each a ``Span`` over the members; effects are against
    ``base``. Raises InputError.
    """
    for scenario in (base, *scenarios):
        _check_settings(scenario.settings)
    config = ForecastConfig(trace=Path(trace), model=Path(model), members=checked_members(members), seed=seed)
    return forecast_scenarios(config, WhatIf(scenarios=tuple(scenarios), base=base))


def _check_settings(names: Iterable[str]) -> None:
    for name in names:
        if name not in SETTINGS:
            near = get_close_matches(name, SETTINGS, 1)
            raise InputError(f"{name}: no setting of the engine; expected {near[0] if near else ', '.join(SETTINGS)}")
