"""A fleet as flags ask for it: how many engines, of which models, under which router, with which events."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.routing.costs import prefill_ms
from engines.routing.router import Router
from engines.routing.routes import Route, make_router, parse_route
from sim.engine.deployment import Deployment
from sim.engine.incidents import EVENT_HELP, Incident, check_events, parse_event
from sim.latency.modelfile import Model
from sim.vllm.config import EngineConfig
from tracefile.records.errors import InputError
from tracefile.records.latenames import LateModule, late_modules

if TYPE_CHECKING:
    import numpy as np

    from sim.engine import dispatch as dispatching
    from sim.engine import fleets
    from sim.engine.dispatch import Dispatch, RoutedLoad, TrueCaches
    from sim.engine.fleets import FleetEngine
    from sim.workload.arrivals import Arrivals
else:  # numpy, which the flags need not
    np = LateModule("numpy")
    dispatching, fleets = late_modules("sim.engine", "dispatch fleets")


CAPTURED = "captured"
"""Route of a fleet whose requests go where they went in the capture."""
LONE_ROUTE = "without --replicas; expected both: one engine leaves no choice"
MOST_REPLICAS = 512
_TOKENS = 1000
"""Of the prefill by which engines of a mixed fleet are compared."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Engines and their router."""

    names: tuple[str, ...]
    route: str
    events: tuple[Incident, ...] = ()

    def parsed_route(self) -> Route | None:
        return None if self.route == CAPTURED else parse_route(self.route)


def add_fleet_flags(parser: argparse.ArgumentParser, *, several: bool) -> None:
    """Declare the flags of a fleet; ``several``: values separated by commas are scenarios."""
    fleet = parser.add_argument_group("fleet", "several engines behind a router (docs/fleet.md)")
    more = ",…" if several else ""
    fleet.add_argument("--replicas", metavar=f"N{more}", help="engines (default: one, or those of the capture)")
    fleet.add_argument(
        "--route",
        metavar=f"POLICY{more}",
        help=f"policy that chooses the engine, as for sim serve; {CAPTURED}: each request's upstream of the capture "
        "(default round-robin)",
    )
    fleet.add_argument("--event", action="append", default=[], metavar="EVENT", help=EVENT_HELP)


def replicas_of(text: str) -> int:
    """Read a number of engines. Raises InputError naming the flag."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if not 1 <= found <= MOST_REPLICAS:
        raise InputError(f"--replicas: {text}; expected a whole number from 1 to {MOST_REPLICAS}")
    return found


def fleet_plan(
    replicas: str | None, route: str | None, events: Sequence[str], upstreams: Callable[[], Sequence[str | None]]
) -> FleetPlan | None:
    """Return the fleet asked for; None: one engine without a router. ``upstreams``: of the capture's requests."""
    incidents = tuple(parse_event(text) for text in events)
    if route == CAPTURED:
        names = upstream_names(upstreams())
        if not names:
            raise InputError(f"--route {CAPTURED}: the trace names no upstream; expected a capture of several")
        if replicas is not None and replicas_of(replicas) != len(names):
            raise InputError(f"--replicas: {replicas}; --route {CAPTURED} has the capture's {len(names)}")
        if incidents:
            raise InputError(f"--event: with --route {CAPTURED} nothing would react; expected another route")
        return FleetPlan(tuple(names), CAPTURED)
    count = 1 if replicas is None else replicas_of(replicas)
    if route is not None:
        parse_route(route)
    if count == 1 and route is None and not incidents:
        return None
    check_events(incidents, count)
    names = upstream_names(upstreams())
    # A session's engine hangs on the engines' names: with the capture's it is the one that the tap would choose.
    return FleetPlan(tuple(names if len(names) == count else map(str, range(count))), route or "round-robin", incidents)


def upstream_names(upstreams: Iterable[str | None]) -> list[str]:
    """Return the servers of a capture's requests, each once, sorted."""
    return sorted({name for name in upstreams if name is not None})


def engines_of(
    plan: FleetPlan, models: Sequence[Model], config_of: Callable[[Model], EngineConfig], deployment: Deployment
) -> "list[FleetEngine]":
    """Return the plan's engines, each of its own model where there are several. Raises InputError."""
    count = len(plan.names)
    if len(models) not in (1, count):
        raise InputError(f"--latency-model: {len(models)} models for {count} engines; expected one, or one for each")
    each = list(models) * (count if len(models) == 1 else 1)
    engines = [
        fleets.FleetEngine(name, config_of(model), model, deployment.tiers)
        for name, model in zip(plan.names, each, strict=True)
    ]
    sizes = {engine.config.block_size for engine in engines}
    if len(sizes) > 1:
        raise InputError(f"--latency-model: block sizes {sorted(sizes)}; expected one size, or --block-size")
    return engines


def run_fleet(
    arrivals: "Arrivals",
    routed: "RoutedLoad",
    engines: "Sequence[FleetEngine]",
    plan: FleetPlan,
    seed: int | None,
    *,
    keeps_rows: bool = False,
) -> "Dispatch":
    """Run a workload through a fleet to its end."""
    route, router, caches, table = plan.parsed_route(), None, None, list[int]()
    if route is None:
        places = {name: place for place, name in enumerate(plan.names)}
        table = [0 if name is None else places[name] for name in routed.upstreams]
    else:
        if route.kind.uses_cache and route.knowledge == "complete":
            caches = dispatching.TrueCaches()
        router = _router(route, engines, caches)
    load = fleets.FleetLoad(arrivals, engines, seed, keeps_rows=keeps_rows)
    incidents = None
    if plan.events:
        start_ms = float(arrivals.arrival_ms.min(initial=np.inf))
        incidents = dispatching.Timeline(plan.events, len(engines), start_ms)
    dispatch = dispatching.Dispatch(load, routed, router, table=table, incidents=incidents, caches=caches)
    dispatch.run()
    return dispatch


def _router(route: Route, engines: "Sequence[FleetEngine]", caches: "TrueCaches | None") -> Router:
    costs = [dispatching.costs_of(engine.model, engine.config) for engine in engines]
    times_ms = [one.t0_ms + prefill_ms(one, _TOKENS, 0.0) for one in costs]
    mixed = len(set(times_ms)) > 1
    return make_router(
        route,
        [engine.name for engine in engines],
        complete=caches,
        capacity_blocks=min(engine.config.usable_blocks for engine in engines),
        costs=costs,
        speeds=[times_ms[0] / own_ms for own_ms in times_ms] if mixed and min(times_ms) > 0.0 else (),
    )
