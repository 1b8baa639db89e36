"""Rules that choose an engine for a request of the tap or of ``sim serve``, from the request and the engines' state."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import xxhash

IMBALANCE_REQUESTS = 8
"""``prefix``: requests that an engine may have more than another …"""
IMBALANCE_RATIO = 1.5
"""… or as a ratio; beyond both, load decides and not the prefix."""
LEAST_MATCH = 0.3
"""``prefix``: least share of a prompt's full blocks that one engine must have cached."""


class Query(NamedTuple):
    """A request, as far as rules use it."""

    number: int
    """Requests before it."""
    session: str | None
    """Its conversation. None: not told."""
    blocks: Sequence[int]
    """Keys of its prompt's full blocks."""


class Standing(NamedTuple):
    """An engine's state when the request arrives."""

    requests: int
    """Waiting and running."""
    kv_usage: float
    cached_blocks: int
    """Leading blocks of the request that it holds; 0 where the rule does not use it."""


Rule = Callable[[Query, Sequence[Standing]], int]
"""Returns the place of the engine that gets the request."""


def in_turn(number: int, count: int) -> list[int]:
    """Return the places of ``count`` engines in the order to try them for request ``number``: one after another."""
    first = number % count
    return [*range(first, count), *range(first)]


def engine_seed(name: str) -> int:
    """Return the seed of an engine's hashes in ``by_rendezvous``."""
    return xxhash.xxh3_64_intdigest(name.encode())


def by_rendezvous(seeds: Sequence[int], session: bytes) -> list[int]:
    """Return the places as a session prefers them: by hash of session and engine, so that no other session moves."""
    return sorted(range(len(seeds)), key=lambda place: xxhash.xxh3_64_intdigest(session, seeds[place]), reverse=True)


@cache
def _seeds(count: int) -> tuple[int, ...]:
    return tuple(engine_seed(str(place)) for place in range(count))


def round_robin(query: Query, engines: Sequence[Standing]) -> int:
    """Return the next engine in turn."""
    return in_turn(query.number, len(engines))[0]


def least_loaded(query: Query, engines: Sequence[Standing]) -> int:
    """Return the engine with the fewest requests; of equals the emptier cache, then in turn."""
    first = query.number % len(engines)
    return min(
        range(len(engines)),
        key=lambda place: (engines[place].requests, engines[place].kv_usage, (place - first) % len(engines)),
    )


def session_hash(query: Query, engines: Sequence[Standing]) -> int:
    """Return the engine of the session; without one, that of the first block; without blocks, the next in turn."""
    if query.session is None and not query.blocks:
        return round_robin(query, engines)
    name = query.session if query.session is not None else f"block {query.blocks[0]}"
    return by_rendezvous(_seeds(len(engines)), name.encode())[0]


def longest_prefix(query: Query, engines: Sequence[Standing]) -> int:
    """Return the engine with most of the prompt cached, unless that is little or the load is uneven, as in SGLang."""
    most, least = max(engine.requests for engine in engines), min(engine.requests for engine in engines)
    if most - least > IMBALANCE_REQUESTS and most > IMBALANCE_RATIO * least:
        return least_loaded(query, engines)
    best = max(engine.cached_blocks for engine in engines)
    if best < max(1.0, LEAST_MATCH * len(query.blocks)):
        return least_loaded(query, engines)
    holders = [place for place, engine in enumerate(engines) if engine.cached_blocks == best]
    return min(holders, key=lambda place: (engines[place].requests, place))


RULES: dict[str, Rule] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "session": session_hash,
    "prefix": longest_prefix,
}
SEES_CACHE = frozenset({"prefix"})
