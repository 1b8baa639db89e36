"""A policy on live traffic: what it needs to see of a request, and the count of its faults."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from engines.routing.load import least_loaded
from engines.routing.records import TOKENS_ALONE, Policy, RoutedEngine, RoutedRequest, RoutingCosts
from engines.routing.router import ADAPTER_SLOTS, Learner
from engines.routing.routes import Route, parse_route
from tracefile.records.errors import InputError, failure_words

FORGETFUL = frozenset({"round-robin", "random", "least-loaded", "power-of-two"})
"""Policies that send a session's requests anywhere."""
BLIND = frozenset({"round-robin", "random", "session"})
"""Policies that no load moves."""


class LivePolicy:
    """A policy, with what it needs to see, and the count of its failures: they cost no request."""

    def __init__(
        self,
        policy: Policy,
        *,
        reads_prompt: bool,
        keeps_sessions: bool,
        sees_load: bool = True,
        costs: RoutingCosts = TOKENS_ALONE,
        adapter_slots: int = 1,
    ) -> None:
        self._policy, self.costs, self.adapter_slots = policy, costs, adapter_slots
        self.reads_prompt, self.keeps_sessions, self.sees_load = reads_prompt, keeps_sessions, sees_load
        self.failures: Counter[str] = Counter()
        """Requests that went to the least loaded instead, by the type of the exception."""
        self.learner = policy if isinstance(policy, Learner) else None

    def choose(self, request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
        """Return the place of the engine; where the policy raises, that of the least loaded."""
        try:
            return self._policy(request, engines)
        except Exception as error:
            name = type(error).__name__
            if not self.failures[name]:  # no text of the exception: it may quote a request
                print(f"tap: --route: {failure_words(error)}; least-loaded routes instead", file=sys.stderr, flush=True)
            self.failures[name] += 1
            return least_loaded(request, engines)


def live_route(text: str) -> Route:
    """Read ``--route``. Raises InputError for what is no route, and for settings of simulated routers alone."""
    route = parse_route(text)
    if route.knowledge == "complete" or route.lag_s or route.index_blocks:
        raise InputError(
            f"--route {text}: complete knowledge, lag and index-blocks are for simulated engines; expected none of them"
        )
    if (slots := route.settings.adapter_slots) > ADAPTER_SLOTS:
        raise InputError(f"--route {text}: {slots} adapter-slots; expected {ADAPTER_SLOTS} at most")
    return route


def live_policy(text: str, seed: int = 0) -> LivePolicy:
    """Return the policy of a flag. ``seed``: added to that of its draws, another one for each worker."""
    route = live_route(text)
    policy = route.kind.make(replace(route.settings, seed=route.settings.seed + seed))
    reads_prompt = route.kind.uses_cache and route.knowledge != "none"
    name = text.split(":", maxsplit=1)[0]
    return LivePolicy(
        policy,
        reads_prompt=reads_prompt,
        keeps_sessions=name not in FORGETFUL,
        sees_load=name not in BLIND,
        costs=route.costs or TOKENS_ALONE,
        adapter_slots=route.settings.adapter_slots,
    )
