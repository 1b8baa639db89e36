"""Fleets in forecasts: a member's run of one, and the run without noise that tells of its busiest engine."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from measure.cache.chains import chain_places
from report.pages.whatif import Routing
from sim.engine.dispatch import Dispatch, RoutedLoad
from sim.engine.fleet import FleetEngine
from sim.engine.fleetplan import FleetPlan, run_fleet
from sim.forecast.captured import Captured, Load, plan
from sim.forecast.ensemble import Forecast, RunOne, forecast
from sim.forecast.saturation import Demand, PointRun, demand_of, extrapolations, run_point
from sim.forecast.scenarios import AS_CAPTURED
from sim.kernels import layout
from sim.kernels.layout import NONE
from sim.latency.modelfile import Model
from sim.vllm.config import EngineConfig

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
    found: Seen = {
        "outcome": runs["outcome"].astype(np.int8),
        "arrival_ms": np.where(runs["outcome"] == layout.PARENT_FAILED, np.nan, runs["arrival_ms"]),
        "ttft_ms": runs["ttft_ms"].copy(),
        "e2e_ms": runs["e2e_ms"].copy(),
        "queue_ms": np.full(count, np.nan),
        "output_tokens": runs["num_seen"].copy(),
        "cached_tokens": np.full(count, -1),
        "preemptions": np.zeros(count, np.int64),
    }
    gaps_ms = [np.empty(0)]
    for number, life in enumerate(fleet.lives):
        places, state = np.flatnonzero(fleet.life_of == number), life.state
        requests = state.scheduler.requests
        found["queue_ms"][places] = (state.runs["admitted_ms"] - state.runs["entry_ms"])[places]
        found["cached_tokens"][places] = requests["cached_tokens"][places]
        found["preemptions"][places] = requests["preemptions"][places]
        gaps = np.maximum(runs["num_seen"][places] - 1, 0)
        gaps_ms.append(state.itl_ms[chain_places(state.runs["first_token"][places] + 1, gaps)])
    return {**found, "gaps_ms": np.concatenate(gaps_ms)}


def point_of(load: Load, model: Model) -> tuple[PointRun, Demand, Routing | None]:
    """Run a load without noise: its steps and demand, of a fleet those of the busiest engine, and its routing."""
    if load.fleet is None:
        point = run_point(load.arrivals, load.engine, model, load.deployment.tiers)
        return point, demand_of(point, load.arrivals, load.engine, model), None
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
    state.runs["parent"] = fleet.state.runs["parent"]
    counts = np.concatenate([rows[number] for number in busiest])
    point = PointRun(state, counts, costs[place][: counts.shape[1]], fleet.traffic)
    places = np.flatnonzero(np.isin(fleet.life_of, busiest))
    served = load.arrivals.take(places) if len(places) else None  # a prefill worker's requests end elsewhere
    demand = demand_of(point, load.arrivals, engine.config, engine.model, own=served)
    return point, demand, _routing(dispatch, load.fleet, by_engine)


class PointRuns:
    """Runs of loads without noise beside the capture's own, which is made once."""

    def __init__(self, captured: Captured, model: Model) -> None:
        self._captured, self._model = captured, model
        self._base: tuple[PointRun, EngineConfig] | None = None

    def __call__(self, load: Load) -> tuple[Demand, float, list[str]]:
        """Return a load's demand, the time up to which its forecast counts, and conditions that no capture showed."""
        if self._base is None:
            as_captured = plan(self._captured, AS_CAPTURED)
            self._base = point_of(as_captured, self._model)[0], as_captured.engine
        base, engine = self._base
        point, demand, _ = point_of(load, self._model)
        horizon_ms = load.horizon_ms if demand.is_saturated and not self._captured.paced else np.inf
        return demand, horizon_ms, list(extrapolations(self._model, base, point, engine, load.engine))


def _routing(dispatch: Dispatch, plan: FleetPlan, work_ms: npt.NDArray[np.float64]) -> Routing:
    engine_of = np.array(dispatch.engine_of)
    requests = np.bincount(engine_of[engine_of != NONE], minlength=len(plan.names))
    return Routing(
        engines=len(plan.names),
        route=plan.route,
        most_requests=int(requests.max()),
        fewest_requests=int(requests.min()),
        work_ratio=round(float(work_ms.max() / max(work_ms.mean(), 1e-9)), 4),
        failed=int(np.isin(dispatch.fleet.state.runs["outcome"], (layout.LOST, layout.NO_ENGINE)).sum()),
    )
