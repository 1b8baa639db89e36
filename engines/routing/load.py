"""Policies that ask no cache: in turn, least loaded, session by rendezvous hash. mypyc compiles this module."""

from collections.abc import Sequence

import xxhash

from engines.routing.records import RoutedEngine, RoutedRequest


def round_robin(request: RoutedRequest, engines: list[RoutedEngine]) -> int:
    """Return the next engine in turn."""
    return request.number % len(engines)


def least_loaded(request: RoutedRequest, engines: list[RoutedEngine]) -> int:
    """Return the engine with the fewest requests; of equals the one with less to prefill, then in turn."""
    fewest = min([engine.requests for engine in engines])
    equals = [place for place, engine in enumerate(engines) if engine.requests == fewest]
    if len(equals) > 1:
        least = min([engines[place].prefill_tokens for place in equals])
        equals = [place for place in equals if engines[place].prefill_tokens == least]
    return equals[request.number % len(equals)]


def least_costly(costs: Sequence[float], request: RoutedRequest, engines: list[RoutedEngine]) -> int:
    """Return the place of the least cost; of equals the least loaded."""
    least = min(costs)
    equals = [place for place, cost in enumerate(costs) if cost == least]
    if len(equals) == 1:
        return equals[0]
    return equals[least_loaded(request, [engines[place] for place in equals])]


def engine_seed(name: str) -> int:
    """Return the seed of an engine's hashes in ``session_hash``."""
    return xxhash.xxh3_64_intdigest(name.encode())


def session_hash(request: RoutedRequest, engines: list[RoutedEngine]) -> int:
    """Return the engine of the session; without one, that of the first block; without blocks, the next in turn."""
    key = request.session
    if key is None:
        if not request.blocks:
            return round_robin(request, engines)
        key = b"block %d" % request.blocks[0]
    weights = [xxhash.xxh3_64_intdigest(key, engine.seed) for engine in engines]
    return weights.index(max(weights))
