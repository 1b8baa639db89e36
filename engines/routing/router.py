"""A router: its account of requests in flight, and its choice among engines. mypyc compiles this module."""

from collections.abc import Sequence
from typing import Protocol

from engines.routing.load import engine_seed
from engines.routing.policies import Learner
from engines.routing.records import TOKENS_ALONE, Policy, RoutedEngine, RoutedRequest, RoutingCosts, uncached_tokens


class Knowledge(Protocol):
    """A router's knowledge of the engines' caches: an index of its own, or the caches themselves.

    None in place of it: no knowledge, every overlap is 0.
    """

    def overlaps(self, blocks: Sequence[int], now_s: float) -> Sequence[int]:
        """Return, by place in the fleet, the leading blocks that the engine is taken to hold."""

    def sent(self, place: int, blocks: Sequence[int], now_s: float) -> None:
        """Learn that a request with these blocks went to an engine."""

    def forget(self, place: int) -> None:
        """Learn that an engine's cache was lost: it died, restarted or was reset."""


class _Sent:
    """A request in flight: the account that its end closes."""

    def __init__(self, request: RoutedRequest, engine: RoutedEngine) -> None:
        self.request = request
        self.engine = engine
        self.prefill_tokens = uncached_tokens(request, engine)
        self.held_tokens = float(request.prompt_tokens)


class Router:
    """Chooses engines by a policy and keeps the account of what it sent. Times are on the caller's clock.

    Order of calls for a request: ``choose``, ``sent`` with the place it went to, ``first_token``, ``ended``.
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
        """``knowledge``: None where the policy does not use it. ``costs``: one for each engine; empty: tokens alone."""
        self.engines: list[RoutedEngine] = [
            RoutedEngine(
                place=place,
                name=name,
                seed=engine_seed(name),
                capacity_blocks=capacity_blocks,
                costs=costs[place] if costs else TOKENS_ALONE,
            )
            for place, name in enumerate(names)
        ]
        self._policy: Policy = policy
        self._knowledge: Knowledge | None = knowledge
        learner: object = policy  # mypyc takes no function for a Learner
        self._learner: Learner | None = learner if isinstance(learner, Learner) else None
        self._candidates: list[RoutedEngine] = self.engines
        self._sent: dict[int, _Sent] = {}

    def choose(self, request: RoutedRequest) -> int:
        """Return the place in the fleet of the engine that gets the request; nothing is counted yet."""
        if self._knowledge is not None:
            overlaps = self._knowledge.overlaps(request.blocks, request.arrival_s)
            for engine in self.engines:
                engine.overlap = overlaps[engine.place]
        return self._candidates[self._policy(request, self._candidates)].place

    def sent(self, request: RoutedRequest, place: int) -> None:
        """Count a request that was sent to an engine: the chosen one, or the next where that was not reached."""
        engine = self.engines[place]
        account = _Sent(request, engine)
        self._sent[request.number] = account
        engine.requests += 1
        engine.prefill_tokens += account.prefill_tokens
        engine.held_tokens += account.held_tokens
        if self._knowledge is not None:
            self._knowledge.sent(place, request.blocks, request.arrival_s)
        if self._learner is not None:
            self._learner.sent(request, engine)

    def first_token(self, number: int) -> None:
        """Take a request's prefill as done. Unknown numbers are ignored: the request has ended."""
        account = self._sent.get(number)
        if account is not None:
            account.engine.prefill_tokens -= account.prefill_tokens
            account.prefill_tokens = 0.0

    def ended(self, number: int, now_s: float) -> None:
        """Close a request's account, however it ended; a second call does nothing."""
        account = self._sent.pop(number, None)
        if account is not None:
            engine = account.engine
            engine.requests -= 1
            engine.prefill_tokens -= account.prefill_tokens
            engine.held_tokens -= account.held_tokens
            if engine.requests == 0:  # sums of floats drift; an idle engine owes nothing
                engine.prefill_tokens = engine.held_tokens = 0.0
            if self._learner is not None:
                self._learner.ended(account.request, engine, now_s)

    def set_healthy(self, place: int, healthy: bool) -> None:
        """Let policies see an engine, or not any more. Its requests in flight stay on the account until they end."""
        self.engines[place].healthy = healthy
        self._candidates = [engine for engine in self.engines if engine.healthy] or self.engines

    def lost_cache(self, place: int) -> None:
        """Forget the blocks of an engine that died, restarted or was reset."""
        if self._knowledge is not None:
            self._knowledge.forget(place)

    def check_integrity(self) -> None:
        for engine in self.engines:
            accounts = [account for account in self._sent.values() if account.engine is engine]
            assert engine.requests == len(accounts)
            assert abs(engine.prefill_tokens - sum(account.prefill_tokens for account in accounts)) < 1e-3
            assert abs(engine.held_tokens - sum(account.held_tokens for account in accounts)) < 1e-3
