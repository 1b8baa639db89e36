"""Choice of an engine for a request: the same functions in the simulated fleet, in ``sim serve`` and in the tap."""

from engines.routing.policies import POLICIES, PolicyKind, PolicySettings
from engines.routing.records import Policy, RoutedEngine, RoutedRequest
from engines.routing.rendezvous import by_rendezvous, engine_seed, in_turn
from engines.routing.router import Knowledge, Router

__all__ = [
    "POLICIES",
    "Knowledge",
    "Policy",
    "PolicyKind",
    "PolicySettings",
    "RoutedEngine",
    "RoutedRequest",
    "Router",
    "by_rendezvous",
    "engine_seed",
    "in_turn",
]
