"""Points of forecasts: a scenario's values by member, its effects, and what no capture supports."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from measure.cohorts import ALL
from measure.thresholds import Threshold
from report.grid.points import LATENCY, Measure, Setting, Span
from sim.forecast import ensemble, saturation
from sim.forecast import summary as summing
from sim.forecast.captured import Load, plan, read_captured
from sim.forecast.fleets import forecast_load, point_of
from sim.forecast.limits import measure_name
from sim.forecast.results import Curve, ForecastPoint
from sim.forecast.saturation import PointRun
from sim.forecast.scenarios import AS_CAPTURED, Scenario, checked_members
from sim.latency.modelfile import load_model, model_digest
from sim.latency.verdicts import engine_warning, verdict_sentence
from tracefile.records.arrays import FloatArray
from tracefile.records.errors import InputError

CONFIDENCE = 0.9
"""Share of the members that must keep a limit."""
Task = tuple[Scenario, int]
"""Scenario and members."""


@dataclass(frozen=True, slots=True)
class PointValues:
    """Forecast of a scenario: values by measure and member."""

    values: dict[str, FloatArray]
    utilization: float | None = None
    """Null with one member."""
    saturated: bool = False
    warnings: Sequence[str] = ()
    """Conditions that no capture showed."""
    assumptions: Sequence[str] = ()
    curves: Mapping[str, Curve] | None = None
    """None with one member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastConfig:
    """Settings of every command that forecasts a capture."""

    trace: Path
    model: Path
    members: int = 32
    seed: int = 0


def config_of(arguments: argparse.Namespace) -> ForecastConfig:
    return ForecastConfig(
        trace=arguments.trace,
        model=arguments.latency_model,
        members=checked_members(arguments.members),
        seed=arguments.seed,
    )


class PointForecast:
    """Forecasts of scenarios of a capture; sent once to each process."""

    def __init__(self, config: ForecastConfig, flag: str = "", limits: Sequence[Threshold] = ()) -> None:
        """Read model and capture. Raises InputError for one of the limits of ``flag`` on requests that it lacks."""
        self.config, self.model = config, load_model(config.model)
        self.captured = read_captured(config.trace, self.model)
        self.cohorts = summing.cohorts_of(self.captured.records)
        for limit in limits:
            if (limit.cohort or ALL) not in self.cohorts:
                cohort = limit.cohort
                raise InputError(f"{flag} {limit.text}: the trace has no requests of {cohort}; expected another cohort")

    def __call__(self, task: Task, *, procs: int | None = 1, done: Callable[[], object] = lambda: None) -> PointValues:
        """Return values by measure; with several members also demand, curves, and what no capture supports."""
        scenario, count = task
        load = plan(self.captured, scenario)
        drawn = [self.model] if count == 1 else ensemble.members(self.model, count, self.config.seed)
        forecast = forecast_load(load, drawn, seed=self.config.seed, procs=procs, done=done)
        waits = summing.waits_of(forecast, self.cohorts)
        made = PointValues(summing.values_of(forecast, waits), assumptions=list(load.deployment.assumptions()))
        if count == 1:
            return made
        point, utilization = point_of(load, self.model)
        return replace(
            made,
            utilization=summing.finite(utilization),
            saturated=utilization >= 1.0,
            warnings=self._warnings(scenario, load, point),
            curves={cohort: summing.curve_of(by_member) for cohort, by_member in waits.items()},
        )

    def _warnings(self, scenario: Scenario, load: Load, point: PointRun) -> list[str]:
        """Return conditions that no capture of the fit showed."""
        settings = [] if scenario == AS_CAPTURED else self.model.other_settings(load.engine)
        opened = saturation.open_parameters(self.model, point)
        return [*opened, *saturation.beyond_fit(point, self.model), *settings]

    def about(self, forecast: ForecastPoint | None = None) -> dict[str, Any]:
        """Return fields of every result. ``own``: the forecast of the capture with its errors; None: it is made."""
        captured, model = self.captured, self.model
        measured = None if forecast is not None else summing.measured_point(captured, self.cohorts)
        if measured is not None and plan(captured, AS_CAPTURED).serves:
            values = self((AS_CAPTURED, self.config.members), procs=None)
            forecast = summing.with_errors(make_point("", {}, values), measured)
        trust = None if forecast is None else summing.trust_in(forecast)
        sentences = [verdict_sentence(self.config.model, model, captured.digest, captured.meta)]
        return {
            "source": self.config.trace.name,
            "headlines": [],
            "verdicts": ["; ".join([*sentences, *([] if trust is None else [trust.sentence])])],
            "trusted": trust is None or trust.trusted,
            "notes": [
                *filter(None, [captured.part_hashed]),
                *engine_warning(model, captured.meta, captured.engine),
            ],
            "trace_digest": captured.digest,
            "model_digest": model_digest(model),
            "paced": captured.paced,
            "cohorts": {name: len(indexes) for name, indexes in self.cohorts.items()},
            "seed": self.config.seed,
            "members": self.config.members,
        }


def make_point(
    name: str,
    settings: Mapping[str, Setting],
    forecast: PointValues,
    limits: Sequence[Threshold] = (),
    *,
    base: Mapping[str, FloatArray] | None = None,
    **more: Any,
) -> ForecastPoint:
    """Return a point with its effects against ``base``, and if enough members keep the limits."""
    kept = [limit.meets(forecast.values[measure_name(limit)]) for limit in limits]
    within = float(np.mean(np.all(kept, axis=0))) if kept else None
    served = not forecast.saturated and not np.median(forecast.values["unserved"])
    measures = {name: summing.measure_beside(name, forecast.values, base) for name in forecast.values}
    shares = {"within": within, "utilization": forecast.utilization}
    measures |= {name: Measure(value=Span(middle=share)) for name, share in shares.items() if share is not None}
    return ForecastPoint(
        name=name,
        settings=dict(settings),
        measures=measures,
        meets=None if within is None else served and within >= CONFIDENCE,
        marks=["saturated"] if forecast.saturated else [],
        warnings=list(forecast.warnings),
        assumptions=list(forecast.assumptions),
        members=len(forecast.values["unserved"]),
        **more,
    )


def with_mark(point: ForecastPoint, *marks: str) -> ForecastPoint:
    return msgspec.structs.replace(point, marks=[*point.marks, *marks])


def latency_of(limits: Sequence[Threshold]) -> str:
    """Return the measure beside throughput: of the first limit on a time, else TTFT p90."""
    return next((measure_name(limit) for limit in limits if limit.unit == "ms"), LATENCY)
