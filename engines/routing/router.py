"""Router: requests in flight, outstanding prefill and the choice of an engine. mypyc compiles this module."""

from collections.abc import Sequence
from typing import Protocol

from engines.routing.load import engine_seed
from engines.routing.policies import Learner
from engines.routing.records import TOKENS_ALONE, Policy, RoutedEngine, RoutedRequest, RoutingCosts, uncached_tokens


class Knowledge(Protocol):
    """Prefix knowledge of a router: a prefix index, or the engines' prefix caches. Without it, overlaps are 0."""

    def overlaps(self, blocks: Sequence[int], now_s: float) -> Sequence[int]:
        """Return the prefix hit of ``blocks`` on each engine of the fleet, in blocks."""

    def sent(self, index: int, blocks: Sequence[int], now_s: float) -> None:
        """Record that a request with these blocks was sent to an engine."""

    def forget(self, index: int) -> None:
        """Record that an engine's prefix cache is empty, after a crash, restart or reset."""


class _Sent:
    """A request in flight, with its share of the engine's prefill and in-flight tokens."""

    def __init__(self, request: RoutedRequest, engine: RoutedEngine) -> None:
        self.request = request
        self.engine = engine
        self.prefill_tokens = uncached_tokens(request, engine)
        self.in_flight_tokens = float(request.prompt_tokens)


class Router:
    """Chooses engines by a policy, and tracks the load and prefill tokens in flight. Times: the caller's clock.

    Calls per request, in order: ``choose``, ``sent`` with the engine's index, ``first_token``, ``ended``.
    """

    def __init__(
        self,
        names: Sequence[str],
        policy: Policy,
        *,
        knowledge: Knowledge | None = None,
        capacity_blocks: int = 0,
        costs: Sequence[RoutingCosts] = (),
    ) -> None:
        """``knowledge``: None if the policy uses no prefix overlaps. ``costs``: per engine; empty: ``TOKENS_ALONE``."""
        self.engines: list[RoutedEngine] = [
            RoutedEngine(
                index=index,
                name=name,
                seed=engine_seed(name),
                capacity_blocks=capacity_blocks,
                costs=costs[index] if costs else TOKENS_ALONE,
            )
            for index, name in enumerate(names)
        ]
        self._policy: Policy = policy
        self._knowledge: Knowledge | None = knowledge
        learner: object = policy  # mypyc does not check a function against Learner
        self._learner: Learner | None = learner if isinstance(learner, Learner) else None
        self._candidates: list[RoutedEngine] = self.engines
        self._sent: dict[int, _Sent] = {}

    def choose(self, request: RoutedRequest) -> int:
        """Return the index in the fleet of the chosen engine; the load is counted by ``sent``."""
        if self._knowledge is not None:
            overlaps = self._knowledge.overlaps(request.blocks, request.arrival_s)
            for engine in self.engines:
                engine.overlap = overlaps[engine.index]
        return self._candidates[self._policy(request, self._candidates)].index

    def sent(self, request: RoutedRequest, index: int) -> None:
        """Add a sent request to the engine's load: the chosen engine, or the next after a failed connection."""
        engine = self.engines[index]
        account = _Sent(request, engine)
        self._sent[request.number] = account
        engine.requests += 1
        engine.prefill_tokens += account.prefill_tokens
        engine.in_flight_tokens += account.in_flight_tokens
        if self._knowledge is not None:
            self._knowledge.sent(index, request.blocks, request.arrival_s)
        if self._learner is not None:
            self._learner.sent(request, engine)

    def first_token(self, number: int) -> None:
        """Subtract a request's prefill tokens: its first token has arrived. Ignored after the request's end."""
        account = self._sent.get(number)
        if account is not None:
            account.engine.prefill_tokens -= account.prefill_tokens
            account.prefill_tokens = 0.0

    def ended(self, number: int, now_s: float) -> None:
        """Subtract a finished or failed request from the engine's load. Idempotent."""
        account = self._sent.pop(number, None)
        if account is not None:
            engine = account.engine
            engine.requests -= 1
            engine.prefill_tokens -= account.prefill_tokens
            engine.in_flight_tokens -= account.in_flight_tokens
            if engine.requests == 0:  # float sums drift; an idle engine has no load
                engine.prefill_tokens = engine.in_flight_tokens = 0.0
            if self._learner is not None:
                self._learner.ended(account.request, engine, now_s)

    def set_healthy(self, index: int, healthy: bool) -> None:
        """Add or remove an engine as a candidate of policies. Its requests in flight stay counted until they end."""
        self.engines[index].healthy = healthy
        self._candidates = [engine for engine in self.engines if engine.healthy] or self.engines

    def lost_cache(self, index: int) -> None:
        """Clear the prefix index of an engine that crashed, restarted or was reset."""
        if self._knowledge is not None:
            self._knowledge.forget(index)

    def check_integrity(self) -> None:
        for engine in self.engines:
            accounts = [account for account in self._sent.values() if account.engine is engine]
            assert engine.requests == len(accounts)
            assert abs(engine.prefill_tokens - sum(account.prefill_tokens for account in accounts)) < 1e-3
            assert abs(engine.in_flight_tokens - sum(account.in_flight_tokens for account in accounts)) < 1e-3
