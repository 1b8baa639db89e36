"""A point of a sweep or a search: its values by member, and what no capture supports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from measure.cohorts import ALL
from measure.thresholds import Threshold
from report.grid.points import LATENCY, Measure, Setting, Span
from sim.forecast import ensemble
from sim.forecast import summary as summing
from sim.forecast.captured import Captured, Load, plan
from sim.forecast.fleets import forecast_load, point_of
from sim.forecast.limits import measure_name
from sim.forecast.results import ForecastPoint
from sim.forecast.saturation import Demand, PointRun, extrapolations
from sim.forecast.scenarios import AS_CAPTURED, Scenario
from sim.latency.modelfile import Model
from sim.latency.verdicts import Trust, engine_warning, verdict_sentence
from sim.vllm.config import EngineConfig
from tracefile.records.arrays import FloatArray
from tracefile.records.errors import InputError

CONFIDENCE = 0.9
"""Share of the members that must keep a limit."""
LATE_SHARE = 0.05
"""Part of a load's length by which its last output may be late, before a single run is taken for a growing queue."""
Task = tuple[Scenario, int]
"""Scenario and members."""


@dataclass(frozen=True, slots=True)
class PointValues:
    """Forecast of a scenario: values by measure and member."""

    values: dict[str, FloatArray]
    beyond: dict[str, float]
    """Of values that may be infinite: what they exceed."""
    utilization: float | None = None
    """Null with one member."""
    saturated: bool | None = None
    warnings: Sequence[str] = ()
    """Conditions that no capture showed."""
    assumptions: Sequence[str] = ()


class PointForecast:
    """Forecasts of scenarios of a capture; sent once to each process."""

    def __init__(self, captured: Captured, model: Model, seed: int) -> None:
        self._captured, self._model, self._seed = captured, model, seed
        self._cohorts = summing.cohorts_of(captured.records)
        self._base: tuple[PointRun, EngineConfig] | None = None
        """Run of the capture without noise, and its engine."""

    def __call__(
        self, task: Task, *, threads: int | None = 1, done: Callable[[], object] = lambda: None
    ) -> PointValues:
        """Return values by measure; with several members also demand, and what no capture supports."""
        scenario, count = task
        load = plan(self._captured, scenario)
        assumptions = list(load.deployment.assumptions())
        if count == 1:
            found = forecast_load(load, [self._model], seed=self._seed, threads=threads)
            horizon_ms = np.inf if self._captured.paced or not _ends_late(found, load) else load.horizon_ms
            values, beyond, _ = summing.measures_of(found, self._cohorts, horizon_ms)
            return PointValues(values, beyond, assumptions=assumptions)
        drawn = ensemble.members(self._model, count, self._seed)
        found = forecast_load(load, drawn, seed=self._seed, threads=threads, done=done)
        demand, horizon_ms, warnings = self._demand(load)
        values, beyond, _ = summing.measures_of(found, self._cohorts, horizon_ms)
        utilization = summing.finite(demand.utilization)
        return PointValues(values, beyond, utilization, demand.is_saturated, warnings, assumptions)

    def _demand(self, load: Load) -> tuple[Demand, float, list[str]]:
        """Return a load's demand, the time up to which its forecast counts, and conditions that no capture showed."""
        if self._base is None:
            as_captured = plan(self._captured, AS_CAPTURED)
            self._base = point_of(as_captured, self._model)[0], as_captured.engine
        base, engine = self._base
        point, demand, _ = point_of(load, self._model)
        horizon_ms = load.horizon_ms if demand.is_saturated and not self._captured.paced else np.inf
        return demand, horizon_ms, list(extrapolations(self._model, base, point, engine, load.engine))


def _ends_late(found: ensemble.Forecast, load: Load) -> bool:
    return bool((found.arrival_ms + found.e2e_ms).max() > load.horizon_ms * (1.0 + LATE_SHARE))


def make_point(
    name: str,
    settings: Mapping[str, Setting],
    found: PointValues,
    limits: Sequence[Threshold],
    *,
    base: Mapping[str, FloatArray] | None = None,
    gpus: int = 1,
    changes: int = 0,
    same_load: bool = True,
) -> ForecastPoint:
    """Return a point with its effects against ``base``, and if enough members keep the limits."""
    kept = [limit.holds_each(found.values[measure_name(limit)]) for limit in limits]
    within = float(np.mean(np.all(kept, axis=0))) if kept else None
    served = not found.saturated and not np.median(found.values["unserved"])
    measures = {name: summing.measure_beside(name, found.values, found.beyond, base) for name in found.values}
    shares = {"within": within, "utilization": found.utilization}
    measures |= {name: Measure(value=Span(middle=share)) for name, share in shares.items() if share is not None}
    return ForecastPoint(
        name=name,
        settings=dict(settings),
        measures=measures,
        meets=served and (within is None or within >= CONFIDENCE),
        warnings=list(found.warnings),
        assumptions=list(found.assumptions),
        members=len(found.values["unserved"]),
        saturated=found.saturated,
        gpus=gpus,
        changes=changes,
        same_load=same_load,
    )


def latency_of(limits: Sequence[Threshold]) -> str:
    """Return the measure beside throughput: of the first limit on a time, else TTFT p90."""
    return next((measure_name(limit) for limit in limits if limit.unit == "ms"), LATENCY)


def check_cohorts(flag: str, limits: Sequence[Threshold], captured: Captured) -> None:
    """Raise InputError for a limit on requests that the trace does not have."""
    known = summing.cohorts_of(captured.records)
    for limit in limits:
        if (limit.cohort or ALL) not in known:
            cohort = limit.cohort
            raise InputError(f"{flag} {limit.text}: the trace has no requests of {cohort}; expected another cohort")


def verdict_on(captured: Captured, model: Model, path: Path, trust: Trust | None) -> str:
    """Return the validation of the model, and its error on this capture."""
    own = [] if trust is None else [trust.sentence]
    return "; ".join([verdict_sentence(path, model, captured.digest, captured.meta), *own])


def shared_notes(captured: Captured, model: Model) -> list[str]:
    """Return what every reader of forecasts of this capture must know."""
    return [
        *filter(None, [captured.part_hashed]),
        *engine_warning(model, captured.meta, captured.engine),
        *ensemble.no_draws(model),
    ]
