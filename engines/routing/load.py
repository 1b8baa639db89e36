"""Policies that look at the requests in flight alone: in turn, at random, least loaded, the better of two."""

from collections.abc import Sequence

import xxhash

from engines.routing.records import Policy, RoutedEngine, RoutedRequest


def round_robin(request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
    """Return the next engine in turn."""
    return request.number % len(engines)


def least_loaded(request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
    """Return the engine with the fewest requests; of equals the one with less to prefill, then in turn."""
    fewest = min([engine.requests for engine in engines])
    equals = [place for place, engine in enumerate(engines) if engine.requests == fewest]
    if len(equals) > 1:
        least = min([engines[place].prefill_tokens for place in equals])
        equals = [place for place in equals if engines[place].prefill_tokens == least]
    return equals[request.number % len(equals)]


def least_costly(costs: Sequence[float], request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
    """Return the place of the least cost; of equals the least loaded."""
    least = min(costs)
    equals = [place for place, cost in enumerate(costs) if cost == least]
    if len(equals) == 1:
        return equals[0]
    return equals[least_loaded(request, [engines[place] for place in equals])]


def random_choice(seed: int) -> Policy:
    """Return a policy that draws an engine by request number and seed: the same again for a seed."""

    def choose(request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
        return _drawn(request.number, seed) % len(engines)

    return choose


def power_of_two(seed: int) -> Policy:
    """Return a policy that draws two engines and takes the one with fewer requests, of equals the first drawn."""

    def choose(request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
        count = len(engines)
        if count == 1:
            return 0
        drawn = _drawn(request.number, seed)
        first = drawn % count
        second = (first + 1 + (drawn >> 32) % (count - 1)) % count
        return second if engines[second].requests < engines[first].requests else first

    return choose


def _drawn(number: int, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(number.to_bytes(8, "little"), seed)
