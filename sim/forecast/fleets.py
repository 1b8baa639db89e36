"""Fleets in forecasts: a member's run of one, and the run without noise that tells of its busiest engine."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from measure.cache.chains import chain_places
from sim.engine.dispatch import Dispatch, RoutedLoad
from sim.engine.fleet import FleetEngine
from sim.engine.fleetplan import FleetPlan, run_fleet
from sim.forecast.captured import Load
from sim.forecast.ensemble import Forecast, RunOne, forecast, seen_columns
from sim.forecast.saturation import PointRun, run_point, utilization_of
from sim.latency.modelfile import Model

Seen = dict[str, npt.NDArray[Any]]


def forecast_load(
    load: Load,
    members: Sequence[Model],
    *,
    seed: int,
    done: Callable[[], object] = lambda: None,
    threads: int | None = None,
) -> Forecast:
    """Forecast a load on every member as its scenario deploys it; ``done`` and ``threads``: see ``forecast``."""
    return forecast(
        load.arrivals,
        load.engine,
        members,
        seed=seed,
        done=done,
        threads=threads,
        run_one=_run_one_of(load),
        deployment=load.deployment.tiers,
    )


def _run_one_of(load: Load) -> RunOne | None:
    """Return a function that runs a load's fleet on a member's model and noise; None: the load is of one engine."""
    plan = load.fleet
    if plan is None:
        return None
    routed = RoutedLoad(load.arrivals, load.engine.block_size)

    def run_member(model: Model, seed: int | None) -> Seen:
        engines = _engines(load, plan, model)
        return _seen(run_fleet(load.arrivals, routed, engines, plan, seed))

    return run_member


def _engines(load: Load, plan: FleetPlan, model: Model) -> list[FleetEngine]:
    return [FleetEngine(name, load.engine, model, load.deployment.tiers) for name in plan.names]


def _seen(dispatch: Dispatch) -> Seen:
    fleet = dispatch.fleet
    runs, count = fleet.state.runs, len(fleet.arrivals)
    found: Seen = seen_columns(runs)
    found |= {"cached_tokens": np.full(count, -1), "preemptions": np.zeros(count, np.int64)}
    gaps_ms = [np.empty(0)]
    for number, life in enumerate(fleet.lives):
        places, state = np.flatnonzero(fleet.life_of == number), life.state
        requests = state.scheduler.requests
        found["cached_tokens"][places] = requests["cached_tokens"][places]
        found["preemptions"][places] = requests["preemptions"][places]
        gaps = np.maximum(runs["num_seen"][places] - 1, 0)
        gaps_ms.append(state.itl_ms[chain_places(state.runs["first_token"][places] + 1, gaps)])
    return {**found, "gaps_ms": np.concatenate(gaps_ms)}


def point_of(load: Load, model: Model) -> tuple[PointRun, float]:
    """Run a load without noise: its steps and utilization, of a fleet those of the busiest engine."""
    if load.fleet is None:
        point = run_point(load.arrivals, load.engine, model, load.deployment.tiers)
        return point, utilization_of(point, load.arrivals, load.engine, model)
    seen = RoutedLoad(load.arrivals, load.engine.block_size)
    engines = _engines(load, load.fleet, model)
    dispatch = run_fleet(load.arrivals, seen, engines, load.fleet, None, keeps_steps=True)
    fleet, costs = dispatch.fleet, [np.array(engine.model.costs) for engine in engines]
    by_engine = np.zeros(len(engines))
    rows = [life.state.timeline.rows[: int(life.state.clock["num_steps"][0])] for life in fleet.lives]
    for life, own in zip(fleet.lives, rows, strict=True):
        by_engine[life.engine] += float((own.sum(axis=0) * costs[life.engine][: own.shape[1]]).sum())
    place = int(by_engine.argmax())
    engine = engines[place]
    busiest = [number for number, life in enumerate(fleet.lives) if life.engine == place]
    state = fleet.lives[max(busiest, key=lambda number: len(rows[number]))].state
    counts, requests = np.concatenate([rows[number] for number in busiest]), state.scheduler.requests[:-1]
    requests = requests[requests["cached_tokens"] >= 0]
    steps = int(state.clock["num_steps"][0])
    point = PointRun(
        counts,
        costs[place][: counts.shape[1]],
        requests["prompt_tokens"],
        requests["cached_tokens"],
        state.timeline.starts_ms[:steps],
        state.timeline.ends_ms[:steps],
        float(np.nanmax(state.runs["admitted_ms"], initial=-np.inf)),
    )
    places = np.flatnonzero(np.isin(fleet.life_of, busiest))
    served = load.arrivals.take(places) if len(places) else None  # a prefill worker's requests end elsewhere
    return point, utilization_of(point, load.arrivals, engine.config, engine.model, own=served)
