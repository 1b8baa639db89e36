"""Routing policies without prefix cache: round-robin, least loaded, session hash. mypyc compiles this module."""

from collections.abc import Sequence

import xxhash

from engines.routing.records import RoutedEngine, RoutedRequest


def round_robin(request: RoutedRequest, engines: list[RoutedEngine]) -> int:
    """Return the index of the next engine in turn."""
    return request.number % len(engines)


def least_loaded(request: RoutedRequest, engines: list[RoutedEngine]) -> int:
    """Return the index of the engine with the fewest requests; ties: fewest prefill tokens, then round-robin."""
    fewest = min([engine.requests for engine in engines])
    equals = [index for index, engine in enumerate(engines) if engine.requests == fewest]
    if len(equals) > 1:
        least = min([engines[index].prefill_tokens for index in equals])
        equals = [index for index in equals if engines[index].prefill_tokens == least]
    return equals[request.number % len(equals)]


def least_costly(costs: Sequence[float], request: RoutedRequest, engines: list[RoutedEngine]) -> int:
    """Return the index of the engine with the least cost; ties: the least loaded engine."""
    least = min(costs)
    equals = [index for index, cost in enumerate(costs) if cost == least]
    if len(equals) == 1:
        return equals[0]
    return equals[least_loaded(request, [engines[index] for index in equals])]


def engine_seed(name: str) -> int:
    """Return the engine's seed for the rendezvous hash of ``session_hash``."""
    return xxhash.xxh3_64_intdigest(name.encode())


def session_hash(request: RoutedRequest, engines: list[RoutedEngine]) -> int:
    """Return the engine by rendezvous hash of the session, else of the first prefix block, else round-robin."""
    key = request.session
    if key is None:
        if not request.blocks:
            return round_robin(request, engines)
        key = b"block %d" % request.blocks[0]
    weights = [xxhash.xxh3_64_intdigest(key, engine.seed) for engine in engines]
    return weights.index(max(weights))
