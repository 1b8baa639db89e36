"""Which of several engines serves a request: rules as functions of the request and of how the engines stand.

A rule decides from its arguments alone, so the same one routes live requests and simulated ones.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash

IMBALANCE_REQUESTS = 8
"""``prefix``: an engine may have so many requests more than another …"""
IMBALANCE_RATIO = 1.5
"""… or this many times as many; beyond both, load decides and not the prefix."""
LEAST_MATCH = 0.3
"""``prefix``: share of a prompt's full blocks that must be cached somewhere for that to decide."""


class Query(NamedTuple):
    """What a rule may know of a request."""

    number: int
    """Requests that came before it."""
    session: str | None
    """The conversation that it belongs to, if it says; else None."""
    blocks: Sequence[int]
    """Keys of its prompt's full blocks."""


class Standing(NamedTuple):
    """How an engine stands when the request comes."""

    requests: int
    """Waiting and running."""
    kv_usage: float
    """Share of the KV cache in use."""
    cached_blocks: int
    """Leading blocks of the request's that it holds; 0 where the rule does not look."""


Rule = Callable[[Query, Sequence[Standing]], int]
"""Place of the engine that gets the request."""


def round_robin(query: Query, engines: Sequence[Standing]) -> int:
    """One after another."""
    return query.number % len(engines)


def least_loaded(query: Query, engines: Sequence[Standing]) -> int:
    """The one with the fewest requests; of equals the emptier cache, then in turn."""
    first = query.number % len(engines)
    return min(
        range(len(engines)),
        key=lambda place: (engines[place].requests, engines[place].kv_usage, (place - first) % len(engines)),
    )


def session_hash(query: Query, engines: Sequence[Standing]) -> int:
    """Always the same for a session; if an engine is added, most sessions stay where they are (rendezvous hashing).

    A request that names no session goes by its first block, the system prompt's mostly; one without any, in turn.
    """
    if query.session is None and not query.blocks:
        return round_robin(query, engines)
    name = query.session if query.session is not None else f"block {query.blocks[0]}"
    return max(range(len(engines)), key=lambda place: xxhash.xxh3_64_intdigest(f"{place} {name}".encode()))


def longest_prefix(query: Query, engines: Sequence[Standing]) -> int:
    """The one that has most of the prompt cached, unless that is little or it is overloaded beside the others.

    The balance of SGLang's router, but with what the engines really hold instead of a memory of what was sent to them.
    """
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
"""Rules that must be told of ``cached_blocks``."""
