"""A fleet's router laid out for compiled code, where its policy is one that needs counts and prefixes alone."""

from collections.abc import Sequence
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
    PREFIX,
    ROUND_ROBIN,
    ROUTED_ENGINE,
    ROUTER,
    SENT,
    TABLE,
    Router,
)
from sim.workload.arrivals import Arrivals

_COMPILED = {
    "round-robin": ROUND_ROBIN,
    "least-loaded": LEAST_LOADED,
    "prefix": PREFIX,
    "cost": COST,
}
_KNOWLEDGE = {"none": NOTHING, "partial": INDEX, "complete": CACHES}


@dataclass(frozen=True, slots=True)
class CompiledRoute:
    """A policy for compiled code; its default asks Python for each request."""

    policy: int = ASKED
    knowledge: int = NOTHING
    index_blocks: int = 0
    lag_s: float = 0.0
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
                index_blocks=route.index_blocks or engines[0].capacity_blocks,
                lag_s=route.lag_s,
                costs=[engine.costs for engine in engines],
            )
    return ASKS


def router_state(arrivals: Arrivals, block_size: int, engines: int, route: CompiledRoute) -> Router:
    settings, requests = np.zeros(1, ROUTER), np.zeros(len(arrivals) + 1, layout.REQUEST)
    for name in ("policy", "knowledge", "lag_s"):
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


def router_pools(arrivals: Arrivals, router: Router, route: CompiledRoute) -> list[Pool]:
    """Return the index's pool of each engine; empty: the policy asks no index."""
    known = router.requests["known_keys"]
    if route.knowledge != INDEX:
        return []
    settings, usable = np.zeros(1, layout.SETTINGS), route.index_blocks
    settings["usable_blocks"], settings["enable_prefix_caching"] = usable, True
    records = min(int(known.sum()) + 1, usable)
    slots = 1 << min(records, MOST_SLOTS).bit_length()
    size = {"records": records, "holds": int(known.max()), "slots": slots}
    return [empty_pool(settings.copy(), usable, arrivals.hashes, **size) for _ in router.engines]
