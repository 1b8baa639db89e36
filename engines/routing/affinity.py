"""Policies that keep a session, or a prompt's first block, on one engine."""

from collections.abc import Sequence
from math import ceil

from engines.routing.load import least_loaded, round_robin
from engines.routing.records import Policy, RoutedEngine, RoutedRequest
from engines.routing.rendezvous import affinity_key, by_rendezvous, first_by_rendezvous


def session_hash(request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
    """Return the engine of the session; without one, that of the first block; without blocks, the next in turn."""
    key = affinity_key(request)
    return round_robin(request, engines) if key is None else first_by_rendezvous(engines, key)


def bounded_hash(load_factor: float) -> Policy:
    """Return ``session_hash`` with bounded load: past engines that hold ``load_factor`` × their share of requests.

    An engine's bound is ⌈load_factor × (requests in flight + 1) × its speed / the fleet's⌉. The first engine within
    it gets the request, in the order that the session prefers.
    """

    def choose(request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
        key = affinity_key(request)
        if key is None:
            return least_loaded(request, engines)
        asked = load_factor * (sum([engine.requests for engine in engines]) + 1)
        speed = sum([engine.speed for engine in engines])
        place = first_by_rendezvous(engines, key)
        if _has_room(engines[place], asked, speed):
            return place
        for place in by_rendezvous([engine.seed for engine in engines], key)[1:]:
            if _has_room(engines[place], asked, speed):
                return place
        return least_loaded(request, engines)

    return choose


def _has_room(engine: RoutedEngine, asked: float, speed: float) -> bool:
    return engine.requests < ceil(asked * engine.speed / speed)
