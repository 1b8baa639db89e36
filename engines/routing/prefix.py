"""Policies that weigh the cached prefix of a prompt against an engine's load."""

from collections.abc import Sequence

from engines.routing.load import least_costly, least_loaded
from engines.routing.records import Policy, RoutedEngine, RoutedRequest, uncached_tokens

IMBALANCE_REQUESTS = 8
"""``prefix``: requests that an engine may have more than another …"""
IMBALANCE_RATIO = 1.5
"""… or as a ratio; beyond both, load decides and not the prefix. SGLang's router: 64 and 1.5."""
LEAST_MATCH = 0.3
"""``prefix``: least share of a prompt's full blocks that one engine must have cached."""


def longest_prefix(request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
    """Return the engine with most of the prompt cached, unless that is little or the load is uneven, as in SGLang."""
    requests = [engine.requests for engine in engines]
    most, least = max(requests), min(requests)
    if most - least > IMBALANCE_REQUESTS and most > IMBALANCE_RATIO * least:
        return least_loaded(request, engines)
    best = max([engine.overlap for engine in engines])
    if best < max(1.0, LEAST_MATCH * len(request.blocks)):
        return least_loaded(request, engines)
    holders = [place for place, engine in enumerate(engines) if engine.overlap == best]
    return min(holders, key=lambda place: (requests[place], place))


def overlap_against_load(overlap_weight: float, adapter_load_tokens: float = 0.0) -> Policy:
    """Return the policy of Dynamo's KV router: least of prefill × ``overlap_weight`` + tokens held, both in tokens.

    Tokens held are those of the requests in flight with this one, a shared prefix once. An engine's prefill is what is
    outstanding plus the prompt's uncached tokens, and ``adapter_load_tokens`` where the
    request's LoRA adapter is not resident. Of equals, the fewest requests.
    """

    def choose(request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
        costs = [tokens_at_stake(engine, uncached_tokens(request, engine), overlap_weight) for engine in engines]
        if request.adapter is not None:
            for place, engine in enumerate(engines):
                if request.adapter not in engine.adapters:
                    costs[place] += overlap_weight * adapter_load_tokens
        return least_costly(costs, request, engines)

    return choose


def tokens_at_stake(engine: RoutedEngine, uncached: float, overlap_weight: float) -> float:
    """Return tokens that ``overlap_against_load`` compares; the simulator compiles it."""
    return overlap_weight * (engine.prefill_tokens + uncached) + engine.held_tokens - engine.repeated_tokens
