"""Fleet settings from flags: engines, routing policy, events."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engines.routing.routes import Route, parse_route
from sim.engine.fleet_events import EVENT_HELP, FleetEvent, check_events, parse_event
from tracefile.records.errors import InputError

CAPTURED = "captured"
"""Route that sends each request to its engine of the capture."""
LONE_ROUTE = "without --replicas; expected both: one engine leaves no choice"
MOST_REPLICAS = 512


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Engines of a fleet, routing policy and events."""

    names: tuple[str, ...]
    route: str
    events: tuple[FleetEvent, ...] = ()

    def parsed_route(self) -> Route | None:
        return None if self.route == CAPTURED else parse_route(self.route)


def add_fleet_flags(parser: argparse.ArgumentParser, *, several: bool) -> None:
    """Add the flags of a fleet; ``several``: comma-separated values are scenarios."""
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
    """Parse a number of engines. Raises InputError naming the flag."""
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 1 <= count <= MOST_REPLICAS:
        raise InputError(f"--replicas: {text}; expected a whole number from 1 to {MOST_REPLICAS}")
    return count


def fleet_plan(
    replicas: str | None, route: str | None, events: Sequence[str], upstreams: Callable[[], Sequence[str | None]]
) -> FleetPlan | None:
    """Return the fleet that the flags set; None: one engine without a router."""
    parsed = tuple(parse_event(text) for text in events)
    if route == CAPTURED:
        names = upstream_names(upstreams())
        if not names:
            raise InputError(f"--route {CAPTURED}: the trace names no upstream; expected a capture of several")
        if replicas is not None and replicas_of(replicas) != len(names):
            raise InputError(f"--replicas: {replicas}; --route {CAPTURED} has the capture's {len(names)}")
        if parsed:
            raise InputError(f"--event: with --route {CAPTURED} nothing would react; expected another route")
        return FleetPlan(tuple(names), CAPTURED)
    count = 1 if replicas is None else replicas_of(replicas)
    if route is not None:
        parse_route(route)
    if count == 1 and route is None and not parsed:
        return None
    check_events(parsed, count)
    names = upstream_names(upstreams())
    # The engine of a session depends on the engines' names: with the capture's names it is the tap's choice.
    return FleetPlan(tuple(names if len(names) == count else map(str, range(count))), route or "round-robin", parsed)


def upstream_names(upstreams: Iterable[str | None]) -> list[str]:
    """Return the distinct upstreams of a capture's requests, sorted."""
    return sorted({name for name in upstreams if name is not None})
