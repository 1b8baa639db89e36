"""Routing of requests to engines (load, session, prefix-aware): shared by simulated fleet, ``sim serve`` and tap."""

import tracefile.compiled  # noqa: F401 - before any module that may be compiled
from engines.routing.load import engine_seed
from engines.routing.policies import POLICIES, Learner, PolicyKind
from engines.routing.records import Policy, RoutedEngine, RoutedRequest, RoutingCosts
from engines.routing.router import Knowledge, Router
from engines.routing.routes import ROUTE_HELP, Route, make_router, parse_route

__all__ = [
    "POLICIES",
    "ROUTE_HELP",
    "Knowledge",
    "Learner",
    "Policy",
    "PolicyKind",
    "Route",
    "RoutedEngine",
    "RoutedRequest",
    "Router",
    "RoutingCosts",
    "engine_seed",
    "make_router",
    "parse_route",
]
