"""Workload-aware routing: predicted TTFT now, plus prefix cache and load that later turns of the session will meet."""

from collections import defaultdict, deque
from typing import Final

import msgspec

from engines.routing.costs import predicted_ttfts_ms, prefill_ms
from engines.routing.load import least_costly
from engines.routing.records import RoutedEngine, RoutedRequest, uncached_tokens

MAX_THINKING = 1 << 17
"""Limit of sessions in think time; beyond it, the sessions with the longest think time count as ended."""
MAX_TURN = 64
"""Turns with separate statistics; later turns are pooled."""
PRIOR_SESSIONS = 4.0
"""Weight of the mean over all turns in the estimate of a single turn, in sessions."""
TURNS_AHEAD = 3
"""Horizon of the policy, in turns."""


class _Mean:
    """Running mean; the prior counts as one value."""

    __slots__ = ("count", "value")

    def __init__(self, prior: float) -> None:
        self.value, self.count = prior, 1

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / self.count


class SessionStatistics:
    """Running statistics of sessions from weak priors: turns, think time, service time, token growth per turn."""

    def __init__(self) -> None:
        self._turns = [[0, 0] for _ in range(MAX_TURN + 1)]
        """Per turn: sessions that ended after the turn, and sessions that continued."""
        self.all_turns = [0, 0]
        self.think_time_s = _Mean(10.0)
        """Think time: from a turn's end to the next turn's arrival, by tools or users."""
        self.service_s = _Mean(2.0)
        """E2E latency of a request."""
        self.growth_tokens = _Mean(500.0)
        """Growth of the prompt from turn to turn, in tokens."""

    def count(self, turn: int, *, continued: bool) -> None:
        """Count a turn after which the session continued (``continued``) or ended."""
        self._turns[min(turn, MAX_TURN)][continued] += 1
        self.all_turns[continued] += 1

    def continuation_probability(self, turn: int) -> float:
        """Return the probability of a further turn after ``turn`` (from 1)."""
        overall = (self.all_turns[True] + 1.0) / (sum(self.all_turns) + 2.0)
        ended, continued = self._turns[min(turn, MAX_TURN)]
        return (continued + PRIOR_SESSIONS * overall) / (continued + ended + PRIOR_SESSIONS)

    def expected_turns(self, turn: int) -> float:
        """Return the expected number of turns within the ``TURNS_AHEAD`` after ``turn``."""
        expected, reached = 0.0, 1.0
        for next_turn in range(turn, turn + TURNS_AHEAD):
            reached *= self.continuation_probability(next_turn)
            expected += reached
        return expected

    @property
    def session_timeout_s(self) -> float:
        """Think time after which a session counts as ended: 4 × mean, exceeded by 2 % of exponential think times."""
        return 4.0 * self.think_time_s.value

    @property
    def active_share(self) -> float:
        """Share of a session's time with a request in flight."""
        turn_s = self.service_s.value + self.think_time_s.value
        return self.service_s.value / turn_s if turn_s > 0.0 else 1.0


class _Session(msgspec.Struct, gc=False):
    """An active session: a request in flight, or within its think time."""

    turn: int = 0
    context_tokens: float = 0.0
    """Prompt tokens of the latest turn."""
    shared_tokens: float = 0.0
    """Prefix hit of the first turn, in tokens: a prefix shared with other sessions."""
    in_flight: int = 0
    thinking_since_s: float = 0.0
    index: int = 0
    """Place of the engine of its latest turn."""
    weight: float = 0.0
    """Probability that the context is needed again: 1 in flight, ``continuation_probability`` in think time."""
    session_tokens: float = 0.0
    """Context tokens without the shared prefix, as counted in the engine's residents."""


class _Residents(msgspec.Struct, gc=False):
    """Active sessions whose latest turn ran on an engine, and their KV cache tokens."""

    count: int = 0
    sessions: float = 0.0
    """Expected number of sessions: the sum of weights."""
    session_tokens: float = 0.0
    """KV cache tokens of the sessions, weighted."""


class WorkloadAware:
    """Minimises predicted TTFT + prefill of evicted contexts + expected turns × (later wait + prefill of lost context).

    - Expected turns: within the next three, by turn, from ``SessionStatistics``.
    - Later wait: other active sessions of the engine × share of time with a request in flight × prefill of a turn's
      growth. Sessions in think time count by their continuation probability.
    - Evicted contexts: uncached prompt tokens evict as many tokens of the KV cache; the share that active sessions
      need is prefilled again.
    - Lost context: the share by which the contexts of all active sessions exceed the engine's KV cache.

    Assumptions: a session ends after four mean think times; sessions differ only by turn; all turns grow by the mean;
    an engine caches the contexts of its active sessions; a session stays on the chosen engine. A request without a
    session has no later turns, so that only the TTFT decides.
    """

    def __init__(self) -> None:
        self.statistics = SessionStatistics()
        self._sessions: dict[bytes, _Session] = {}
        self._thinking: deque[tuple[float, bytes]] = deque()
        """Start of each think time, oldest first; outdated after the session's next turn."""
        self._residents: defaultdict[int, _Residents] = defaultdict(_Residents)

    def __call__(self, request: RoutedRequest, engines: list[RoutedEngine]) -> int:
        self._expire(request.arrival_s)
        costs = predicted_ttfts_ms(request, engines)
        if request.session is not None:
            self._add_later_turns(costs, request, engines, self._sessions.get(request.session, _NEW))
        return least_costly(costs, request, engines)

    def sent(self, request: RoutedRequest, engine: RoutedEngine) -> None:
        if request.session is None:
            return
        session = self._sessions.get(request.session)
        if session is None:
            shared_tokens = min(engine.overlap * request.block_tokens, request.prompt_tokens)
            self._sessions[request.session] = session = _Session(shared_tokens=shared_tokens)
        elif not session.in_flight:
            self.statistics.count(session.turn, continued=True)
            self.statistics.think_time_s.add(request.arrival_s - session.thinking_since_s)
            self.statistics.growth_tokens.add(max(0.0, request.prompt_tokens - session.context_tokens))
        session.turn = request.turn or session.turn + 1
        session.in_flight += 1
        session.context_tokens = float(request.prompt_tokens)
        self._count(session, engine.index, 1.0)

    def ended(self, request: RoutedRequest, engine: RoutedEngine, now_s: float) -> None:
        session = None if request.session is None else self._sessions.get(request.session)
        if request.session is None or session is None:
            return
        self.statistics.service_s.add(now_s - request.arrival_s)
        session.in_flight -= 1
        if not session.in_flight:
            session.thinking_since_s = now_s
            self._thinking.append((now_s, request.session))
            self._count(session, session.index, self.statistics.continuation_probability(session.turn))

    def _add_later_turns(
        self, costs: list[float], request: RoutedRequest, engines: list[RoutedEngine], session: _Session
    ) -> None:
        """Add to each engine's cost the prefill of evicted contexts, and the wait and lost prefill of later turns."""
        statistics, prompt_tokens = self.statistics, request.prompt_tokens
        ahead = statistics.expected_turns(request.turn or session.turn + 1)
        session_tokens = max(0.0, prompt_tokens - session.shared_tokens)
        for index, engine in enumerate(engines):
            residents = self._residents[engine.index]
            sessions, tokens = residents.sessions, residents.session_tokens
            if session.weight and session.index == engine.index:
                sessions, tokens = (
                    sessions - session.weight,
                    tokens - session.weight * session.session_tokens,
                )
            turn_ms = prefill_ms(engine.costs, statistics.growth_tokens.value, prompt_tokens)
            costs[index] += ahead * statistics.active_share * max(0.0, sessions) * turn_ms
            capacity_tokens = engine.capacity_blocks * request.block_tokens
            if capacity_tokens:
                new_tokens = uncached_tokens(request, engine)
                costs[index] += min(1.0, max(0.0, tokens) / capacity_tokens) * prefill_ms(engine.costs, new_tokens, 0.0)
                lost_share = max(0.0, 1.0 - capacity_tokens / max(capacity_tokens, tokens + session_tokens))
                costs[index] += ahead * lost_share * prefill_ms(engine.costs, prompt_tokens, 0.0)

    def _count(self, session: _Session, index: int, weight: float) -> None:
        """Move a session's weight to the residents of ``index``."""
        before, after = self._residents[session.index], self._residents[index]
        before.count -= session.weight > 0.0
        before.sessions -= session.weight
        before.session_tokens -= session.weight * session.session_tokens
        if not before.count:  # float sums drift; an engine without sessions is empty
            before.sessions = before.session_tokens = 0.0
        session.index, session.weight = index, weight
        session.session_tokens = max(0.0, session.context_tokens - session.shared_tokens)
        after.count += weight > 0.0
        after.sessions += weight
        after.session_tokens += weight * session.session_tokens

    def _expire(self, now_s: float) -> None:
        """End sessions after the session timeout, and the oldest beyond ``MAX_THINKING``."""
        timeout_s = self.statistics.session_timeout_s
        while self._thinking and (now_s - self._thinking[0][0] > timeout_s or len(self._thinking) > MAX_THINKING):
            thinking_since_s, key = self._thinking.popleft()
            session = self._sessions.get(key)
            if session is not None and not session.in_flight and session.thinking_since_s == thinking_since_s:
                self.statistics.count(session.turn, continued=False)
                self._count(session, session.index, 0.0)
                del self._sessions[key]


_NEW: Final = _Session()
