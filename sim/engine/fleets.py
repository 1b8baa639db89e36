"""Fleet of engines on one workload: construction, run under a router, results of the requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from librt.vecs import vec

from engines.routing.costs import prefill_ms, routing_costs
from engines.routing.router import Router
from engines.routing.routes import Route, make_router
from measure.cache.vectors import floats
from sim.engine.deployment import Deployment
from sim.engine.dispatch import Dispatch, Routed, Timeline
from sim.engine.fleet import NONE, Fleet, Life
from sim.engine.fleetplan import FleetPlan
from sim.engine.results import EngineResults, Results
from sim.engine.simulatedrequest import SimulatedRequest
from sim.engine.simulation import make_engine, request_columns
from sim.engine.tiers import TierTraffic, traffic_of
from sim.latency.modelfile import Model
from sim.latency.noise import frontend_factors
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import Arrivals
from tracefile.records.arrays import BoolArray, IntArray
from tracefile.records.errors import InputError

COMPARED_TOKENS = 1000
"""Tokens of the prefill that compares the engines of a mixed fleet."""


@dataclass(frozen=True, slots=True)
class FleetEngine:
    """Engine of a fleet: scheduler settings, latency model, KV cache offloading."""

    name: str
    config: EngineConfig
    model: Model
    deployment: Deployment | None = None


def engines_of(
    plan: FleetPlan, models: Sequence[Model], config_of: Callable[[Model], EngineConfig], deployment: Deployment
) -> list[FleetEngine]:
    """Return the plan's engines, with a shared latency model or a model per engine. Raises InputError."""
    count = len(plan.names)
    if len(models) not in (1, count):
        raise InputError(f"--latency-model: {len(models)} models for {count} engines; expected one, or one for each")
    engine_models = list(models) * (count if len(models) == 1 else 1)
    engines = [
        FleetEngine(name, config_of(model), model, deployment.tiers)
        for name, model in zip(plan.names, engine_models, strict=True)
    ]
    sizes = {engine.config.block_size for engine in engines}
    if len(sizes) > 1:
        raise InputError(f"--latency-model: block sizes {sorted(sizes)}; expected one size, or --block-size")
    return engines


def routed_requests(arrivals: Arrivals, block_size: int) -> list[Routed]:
    """Return the requests of a workload with the fields that a router reads: session, prompt block keys, tokens."""
    starts = np.cumsum(arrivals.hashed_blocks) - arrivals.hashed_blocks
    ends = starts + np.minimum(arrivals.hashed_blocks, arrivals.prompt_tokens // block_size)
    names = ("session_id", "max_tokens", "turn")
    columns = (starts.tolist(), ends.tolist(), arrivals.prompt_tokens.tolist(), *map(arrivals.column, names))
    keys, block_tokens = arrivals.hashes.data, float(block_size)
    return [
        (word if word is None else word.encode(), keys[start:end], block_tokens, tokens, limit or None, turn or None)
        for start, end, tokens, word, limit, turn in zip(*columns, strict=True)
    ]


class FleetLoad:
    """Workload on a fleet of engines; ``dispatch``: its run under a router."""

    dispatch: Dispatch

    def __init__(
        self, arrivals: Arrivals, engines: Sequence[FleetEngine], seed: int | None, *, keeps_rows: bool = False
    ) -> None:
        """``seed``: None: without noise. ``keeps_rows``: engines record the term counts of every scheduler step."""
        self.arrivals, self.engines = arrivals, engines
        block_size = engines[0].config.block_size
        requests = request_columns(arrivals, block_size).make(floats(np.ones(len(arrivals))))
        start_ms = min(float(arrivals.arrival_ms.min(initial=0.0)), 0.0)
        make_life = partial(_make_life, arrivals.ids, engines, seed, start_ms, keeps_rows)
        self.fleet = Fleet(requests, len(engines), make_life, block_size=block_size, now_ms=start_ms)

    @property
    def requests(self) -> list[SimulatedRequest]:
        """Requests as the router sees them, in the order of ``arrivals``."""
        return self.fleet.requests

    def life_of(self) -> IntArray:
        """Return the index of the engine's life that served each request; NONE: no engine did."""
        return np.array([request.life for request in self.requests], np.int64)

    def served_in(self, life: Life) -> list[SimulatedRequest]:
        """Return the engine's copies of the requests that a life served."""
        served = (request.served for request in self.requests if request.life == life.index)
        return [request for request in served if request is not None]

    def results(self) -> Results:
        """Return the results of all requests: latencies and cached tokens."""
        life_of = self.life_of()
        engines = [
            self._results_in(life_of == life.index, life.engine.delivered_ms, self.engines[life.number].name)
            for life in self.fleet.lives
        ]
        unserved = self._results_in(life_of == NONE, vec[float](), None)
        return Results(self.arrivals, [*engines, unserved], is_fleet=True)

    @property
    def traffic(self) -> TierTraffic:
        """KV cache traffic to and from host memory."""
        return traffic_of([life.engine for life in self.fleet.lives], [life.engine for life in self.fleet.current])

    def _results_in(self, is_there: BoolArray, delivered_ms: vec[float], upstream: str | None) -> EngineResults:
        rows = np.flatnonzero(is_there)
        served = [self.requests[row].as_served() for row in rows.tolist()]
        return EngineResults(served, rows, delivered_ms, upstream)


def _make_life(  # noqa: PLR0917 - one for each side's need
    ids: list[str],
    engines: Sequence[FleetEngine],
    seed: int | None,
    start_ms: float,
    keeps_rows: bool,
    number: int,
    life: int,
) -> Life:
    """Create life ``life`` of a fleet, of engine ``number``, with an empty prefix cache. ``ids``: of all requests."""
    spec, seed = engines[number], engine_seed(seed, number if life < len(engines) else life)
    engine = make_engine(
        spec.config, spec.model, seed, deployment=spec.deployment, now_ms=start_ms, keeps_rows=keeps_rows
    )
    return Life(number, engine, floats(frontend_factors(spec.model.noise, seed, ids)))


def engine_seed(seed: int | None, number: int) -> int | None:
    """Return the noise seed of an engine; the first engine has the seed of the run."""
    if seed is None or number == 0:
        return seed
    sequence = np.random.SeedSequence((seed & 0xFFFFFFFFFFFFFFFF, number))
    return int(sequence.generate_state(1, np.uint64)[0])


def run_fleet(
    arrivals: Arrivals,
    routed: list[Routed],
    engines: Sequence[FleetEngine],
    plan: FleetPlan,
    seed: int | None,
    *,
    keeps_rows: bool = False,
) -> FleetLoad:
    """Run a workload on a fleet until all requests have ended."""
    load, route = FleetLoad(arrivals, engines, seed, keeps_rows=keeps_rows), plan.parsed_route()
    if route is None:
        fleet, upstreams = load.fleet, arrivals.column("upstream")
        number_of = {name: number for number, name in enumerate(plan.names)}
        router = Router(plan.names, lambda request, engines: number_of.get(upstreams[fleet.coming], 0))
    else:
        router = _router(route, load)
    timeline = None
    if plan.events:
        start_ms = float(arrivals.arrival_ms.min(initial=np.inf))
        timeline = Timeline(plan.events, len(engines), start_ms)
    load.dispatch = Dispatch(load.fleet, routed, router, timeline=timeline)
    load.dispatch.run()
    return load


def _router(route: Route, load: FleetLoad) -> Router:
    engines = load.engines
    costs = [routing_costs(engine.model.cost_by_name, engine.config.max_num_batched_tokens) for engine in engines]
    times_ms = [cost.t0_ms + prefill_ms(cost, COMPARED_TOKENS, 0.0) for cost in costs]
    mixed = len(set(times_ms)) > 1
    return make_router(
        route,
        [engine.name for engine in engines],
        complete=load.fleet,
        capacity_blocks=min(engine.config.usable_blocks for engine in engines),
        costs=costs,
        speeds=[times_ms[0] / time_ms for time_ms in times_ms] if mixed and min(times_ms) > 0.0 else (),
    )
