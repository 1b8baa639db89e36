"""Fleets in forecasts: a member's run of one, and the run without noise that tells of its busiest engine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.engine.columns import ResultColumns
from sim.engine.fleetplan import FleetPlan
from sim.engine.fleets import FleetEngine, FleetLoad, routed_requests, run_fleet
from sim.engine.simulation import delivered_ms_of, thinned_gaps
from sim.forecast.captured import Load
from sim.forecast.ensemble import MOST_GAPS, Forecast, RunOne, forecast, seen_columns
from sim.forecast.saturation import PointRun, point_run, run_point, utilization_of
from sim.latency.modelfile import Model
from sim.workload.arrivals import Arrivals

Seen = dict[str, npt.NDArray[Any]]


def forecast_load(
    load: Load,
    members: Sequence[Model],
    *,
    seed: int,
    done: Callable[[], object] = lambda: None,
    procs: int | None = None,
) -> Forecast:
    """Forecast a load on every member as its scenario deploys it; ``done`` and ``procs``: see ``forecast``."""
    return forecast(
        load.arrivals,
        load.engine,
        members,
        seed=seed,
        done=done,
        procs=procs,
        lay_out=None if load.fleet is None else partial(_lay_out, load),
        deployment=load.deployment.tiers,
    )


def _lay_out(load: Load, arrivals: Arrivals) -> RunOne:
    """Return a function that runs a load's fleet on a member's model and noise."""
    plan, routed = load.fleet, routed_requests(arrivals, load.engine.block_size)
    assert plan is not None  # or one engine runs it

    def run_member(model: Model, seed: int | None) -> Seen:
        return _seen(run_fleet(arrivals, routed, _engines(load, plan, model), plan, seed))

    return run_member


def _engines(load: Load, plan: FleetPlan, model: Model) -> list[FleetEngine]:
    return [FleetEngine(name, load.engine, model, load.deployment.tiers) for name in plan.names]


def _seen(load: FleetLoad) -> Seen:
    served = [request.served or request for request in load.requests]
    parts = [(load.served_in(life), delivered_ms_of(life.engine)) for life in load.fleet.lives]
    return seen_columns(ResultColumns(load.requests)) | {
        "cached_tokens": np.array([request.cached_tokens for request in served]),
        "preemptions": np.array([request.preemptions for request in served]),
        "gaps_ms": thinned_gaps(parts, MOST_GAPS),
    }


def point_of(load: Load, model: Model) -> tuple[PointRun, float]:
    """Run a load without noise: its steps and utilization, of a fleet those of the busiest engine."""
    if load.fleet is None:
        point = run_point(load.arrivals, load.engine, model, load.deployment.tiers)
        return point, utilization_of(point, load.arrivals, load.engine, model)
    routed = routed_requests(load.arrivals, load.engine.block_size)
    engines = _engines(load, load.fleet, model)
    run = run_fleet(load.arrivals, routed, engines, load.fleet, None, keeps_rows=True)
    life_of, by_engine = run.life_of(), np.zeros(len(engines))
    points = []
    for life in run.fleet.lives:
        points.append(point_run(life.engine, run.served_in(life), engines[life.number].model))
        by_engine[life.number] += float((points[-1].counts.sum(axis=0) * points[-1].costs).sum())
    place = int(by_engine.argmax())
    busiest = [int(life.index) for life in run.fleet.lives if life.number == place]
    longest = max((points[index] for index in busiest), key=lambda point: len(point.counts))
    point = replace(longest, counts=np.concatenate([points[index].counts for index in busiest]))
    rows = np.flatnonzero(np.isin(life_of, busiest))
    local = load.arrivals.select(rows) if len(rows) else None  # a prefill worker's requests end elsewhere
    return point, utilization_of(point, load.arrivals, engines[place].config, engines[place].model, local=local)
