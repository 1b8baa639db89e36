"""The engines of a fleet's plan, and a workload's run through them."""

from collections.abc import Callable, Sequence
from math import inf

from engines.routing.costs import prefill_ms, routing_costs
from engines.routing.router import Router
from engines.routing.routes import Route, make_router
from sim.engine.deployment import Deployment
from sim.engine.dispatch import Dispatch, Routed, Timeline
from sim.engine.fleetplan import FleetPlan
from sim.engine.fleets import FleetEngine, FleetLoad, upstreams_of
from sim.latency.modelfile import Model
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import Arrivals
from tracefile.records.errors import InputError

_TOKENS = 1000
"""Of the prefill by which engines of a mixed fleet are compared."""


def engines_of(
    plan: FleetPlan, models: Sequence[Model], config_of: Callable[[Model], EngineConfig], deployment: Deployment
) -> list[FleetEngine]:
    """Return the plan's engines, each of its own model where there are several. Raises InputError."""
    count = len(plan.names)
    if len(models) not in (1, count):
        raise InputError(f"--latency-model: {len(models)} models for {count} engines; expected one, or one for each")
    each = list(models) * (count if len(models) == 1 else 1)
    engines = [
        FleetEngine(name, config_of(model), model, deployment.tiers)
        for name, model in zip(plan.names, each, strict=True)
    ]
    sizes = {engine.config.block_size for engine in engines}
    if len(sizes) > 1:
        raise InputError(f"--latency-model: block sizes {sorted(sizes)}; expected one size, or --block-size")
    return engines


def run_fleet(
    arrivals: Arrivals,
    routed: list[Routed],
    engines: Sequence[FleetEngine],
    plan: FleetPlan,
    seed: int | None,
    *,
    keeps_rows: bool = False,
) -> FleetLoad:
    """Run a workload through a fleet to its end."""
    route, router, table = plan.parsed_route(), None, list[int]()
    load = FleetLoad(arrivals, engines, seed, keeps_rows=keeps_rows)
    if route is None:
        places = {name: place for place, name in enumerate(plan.names)}
        table = [0 if name is None else places[name] for name in upstreams_of(arrivals)]
    else:
        router = _router(route, load)
    incidents = None
    if plan.events:
        start_ms = float(arrivals.arrival_ms.min(initial=inf))
        incidents = Timeline(plan.events, len(engines), start_ms)
    load.dispatch = Dispatch(load.fleet, routed, router, table=table, incidents=incidents)
    load.dispatch.run()
    return load


def _router(route: Route, load: FleetLoad) -> Router:
    engines = load.engines
    costs = [routing_costs(one.model.cost_by_name, one.config.max_num_batched_tokens) for one in engines]
    times_ms = [one.t0_ms + prefill_ms(one, _TOKENS, 0.0) for one in costs]
    mixed = len(set(times_ms)) > 1
    return make_router(
        route,
        [engine.name for engine in engines],
        complete=load.fleet,
        capacity_blocks=min(engine.config.usable_blocks for engine in engines),
        costs=costs,
        speeds=[times_ms[0] / own_ms for own_ms in times_ms] if mixed and min(times_ms) > 0.0 else (),
    )
