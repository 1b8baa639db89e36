"""Order of engines that needs no state, by rendezvous hash; policies that keep a session on one engine by it."""

from collections.abc import Sequence
from math import ceil

import xxhash

from engines.routing.load import least_loaded, round_robin
from engines.routing.records import Policy, RoutedEngine, RoutedRequest


def engine_seed(name: str) -> int:
    """Return the seed of an engine's hashes in ``by_rendezvous``."""
    return xxhash.xxh3_64_intdigest(name.encode())


def by_rendezvous(seeds: Sequence[int], session: bytes) -> list[int]:
    """Return the places as a session prefers them: by hash of session and engine, so that no other session moves."""
    weights = [xxhash.xxh3_64_intdigest(session, seed) for seed in seeds]
    return sorted(range(len(seeds)), key=weights.__getitem__, reverse=True)


def first_by_rendezvous(engines: Sequence[RoutedEngine], session: bytes) -> int:
    """Return the first place of ``by_rendezvous``."""
    weights = [xxhash.xxh3_64_intdigest(session, engine.seed) for engine in engines]
    return weights.index(max(weights))


def affinity_key(request: RoutedRequest) -> bytes | None:
    """Return the key that keeps requests together: the session, without it the first block. None: neither is known."""
    if request.session is not None:
        return request.session
    return b"block %d" % request.blocks[0] if request.blocks else None


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
