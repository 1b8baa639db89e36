"""The latency model from Python: fit to captures, and forecast another cache size, rate or setting."""

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

    Each parameter has its unit. ``bootstrap``: resamples of sessions, 0: no intervals. ``terms``: additional terms of
    the step time; None: selected by held-out error. ``api_server``: ``parallel``, ``serial``, ``shared_core``; None:
    selected. ``settings``: engine settings that are not in the traces. Raises InputError.
    """
    _check_settings(settings)
    if bootstrap < 0:
        raise InputError(f"bootstrap: {bootstrap}; expected 0 or more")
    paths, path = tuple(Path(trace) for trace in traces), Path(output)
    check_output(path, MODEL, paths, "output")
    extra = None if terms is None else tuple(terms)
    config = FitConfig(paths, path, settings, bootstrap, seed, frontend=api_server, extra_terms=extra)
    model = fit_traces(config).model
    save_model(model, path)
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
    """Forecast a capture with its settings and with each scenario; the first of ``points`` is the measured load.

    ``model``: a model.json that was not fitted on this trace. Latencies in ms, each a ``Span`` over members; effects
    are relative to ``base``. Raises InputError.
    """
    for scenario in (base, *scenarios):
        _check_settings(scenario.settings)
    config = ForecastConfig(trace=Path(trace), model=Path(model), members=checked_members(members), seed=seed)
    return forecast_scenarios(config, WhatIf(scenarios=tuple(scenarios), base=base))


def _check_settings(names: Iterable[str]) -> None:
    for name in names:
        if name not in SETTINGS:
            near = get_close_matches(name, SETTINGS, 1)
            raise InputError(f"{name}: not an engine setting; expected {near[0] if near else ', '.join(SETTINGS)}")
