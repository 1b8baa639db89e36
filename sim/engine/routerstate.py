"""A fleet's router laid out for compiled code, where its policy is one that needs counts and prefixes alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engines.routing.policies import POLICIES
from engines.routing.records import RoutedEngine, RoutingCosts
from engines.routing.routes import Route
from sim.engine.simstate import MOST_SLOTS
from sim.kernels import layout
from sim.kernels.layout import NONE, Places, Pool
from sim.kernels.pool import empty_pool
from sim.kernels.routing import (
    ASKED,
    CACHES,
    COST,
    INDEX,
    LEAST_LOADED,
    NOTHING,
    OVERLAP,
    PREFIX,
    ROUND_ROBIN,
    ROUTED_ENGINE,
    ROUTER,
    SENT,
    TABLE,
    Router,
)
from sim.vllm.rules import FREE_RULES
from sim.workload.arrivals import Arrivals

_COMPILED = {
    "round-robin": ROUND_ROBIN,
    "least-loaded": LEAST_LOADED,
    "prefix": PREFIX,
    "overlap": OVERLAP,
    "cost": COST,
}
_KNOWLEDGE = {"none": NOTHING, "partial": INDEX, "complete": CACHES}


@dataclass(frozen=True, slots=True)
class CompiledRoute:
    """A policy for compiled code; its default asks Python for each request."""

    policy: int = ASKED
    knowledge: int = NOTHING
    counts_active: bool = False
    index_blocks: int = 0
    lag_s: float = 0.0
    overlap_weight: float = 1.0
    table: Sequence[int] = ()
    """Engine of each request, of TABLE."""
    costs: Sequence[RoutingCosts] = ()
    """Of each engine."""


ASKS = CompiledRoute()


def by_table(table: Sequence[int]) -> CompiledRoute:
    return CompiledRoute(policy=TABLE, table=table)


def compiled_route(route: Route, engines: Sequence[RoutedEngine]) -> CompiledRoute:
    """Return a route for compiled code; ``ASKS`` where its policy is not compiled."""
    for name, policy in _COMPILED.items():
        if route.kind is POLICIES[name]:
            return CompiledRoute(
                policy,
                knowledge=_KNOWLEDGE[route.knowledge] if route.kind.uses_cache else NOTHING,
                counts_active=route.kind.uses_active,
                index_blocks=route.index_blocks or engines[0].capacity_blocks,
                lag_s=route.lag_s,
                overlap_weight=route.settings.overlap_weight,
                costs=[engine.costs for engine in engines],
            )
    return ASKS


def router_state(arrivals: Arrivals, block_size: int, engines: int, route: CompiledRoute) -> Router:
    settings, requests = np.zeros(1, ROUTER), np.zeros(len(arrivals) + 1, layout.REQUEST)
    for name in ("policy", "knowledge", "counts_active", "lag_s", "overlap_weight"):
        settings[name] = getattr(route, name)
    settings["block_tokens"] = block_size
    known = np.zeros(engines, ROUTED_ENGINE)
    for engine, costs in zip(known, route.costs, strict=False):
        for name in RoutingCosts.__struct_fields__:
            engine[name] = getattr(costs, name)
    sent = np.zeros(len(arrivals), SENT)
    sent["engine"] = NONE
    requests["prompt_tokens"][:-1] = arrivals.prompt_tokens
    requests["known_keys"][:-1] = np.minimum(arrivals.known, arrivals.prompt_tokens // block_size)
    requests["first_key"][:-1] = np.cumsum(arrivals.known) - arrivals.known
    table: Places = np.array(route.table, np.int64)
    return Router(settings, known, sent, requests, table)


def router_pools(arrivals: Arrivals, router: Router, route: CompiledRoute) -> Iterator[tuple[int, Pool]]:
    """Yield pools with their rows after the engines': of each engine the blocks in use, of each those of the index."""
    engines, known = len(router.engines), router.requests["known_keys"]
    blocks = int(known.sum()) + 1
    for engine in range(engines):
        if route.counts_active:  # each request cuts once and lengthens once
            yield engine, _pool(arrivals, blocks, min(blocks, 2 * len(arrivals)), blocks)
        if route.knowledge == INDEX:
            index_blocks = route.index_blocks
            yield engines + engine, _pool(arrivals, index_blocks, min(blocks, index_blocks), int(known.max()))


def _pool(arrivals: Arrivals, usable: int, records: int, holds: int) -> Pool:
    settings = np.zeros(1, layout.SETTINGS)
    settings["usable_blocks"], settings["enable_prefix_caching"] = usable, True
    settings["free_rule"] = FREE_RULES.index("vllm")
    slots = 1 << min(records, MOST_SLOTS).bit_length()
    return empty_pool(settings, usable, arrivals.hashes, records=records, holds=holds, slots=slots)
