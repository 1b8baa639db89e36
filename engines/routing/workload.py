"""Workload-aware policy: a session goes where its next turns, too, will find their cache and a free engine."""

from collections import defaultdict, deque
from collections.abc import Sequence
from copy import deepcopy
from typing import Final

import msgspec

from engines.routing.costs import predicted_ttfts_ms, prefill_ms
from engines.routing.load import least_costly
from engines.routing.records import RoutedEngine, RoutedRequest, uncached_tokens
from engines.routing.sessions import SessionStatistics

MAX_RESTING = 1 << 17
"""Rests that are remembered; of more the longest count as ends."""


class _Session(msgspec.Struct, gc=False):
    """A living session: in flight, or at rest and not yet given up."""

    turn: int = 0
    context_tokens: float = 0.0
    """Prompt tokens of its latest turn."""
    shared_tokens: float = 0.0
    """Leading ones that its first turn found cached: a prefix of other sessions."""
    in_flight: int = 0
    rests_since_s: float = 0.0
    place: int = 0
    """Place of the engine of its latest turn."""
    weight: float = 0.0
    """Probability that its context is needed again: 1 in flight, that of another turn at rest."""
    own_tokens: float = 0.0
    """Context without the shared prefix, as counted among the engine's residents."""


class _Residents(msgspec.Struct, gc=False):
    """Living sessions whose latest turn ran on one engine."""

    count: int = 0
    sessions: float = 0.0
    """Expected number: the sum of their weights."""
    own_tokens: float = 0.0
    """Tokens of KV cache that they need, weighted alike."""


class WorkloadAware:
    """Least of: predicted TTFT now + prefill that it costs others + expected further turns × (wait then + prefill of
    its own context lost by then).

    - Further turns: expected number within the next three, by turn, from ``SessionStatistics``.
    - Wait then: the engine's other living sessions × the share of time in which a session has a request in flight ×
      the prefill of a turn's growth. Living are sessions in flight and those at rest, by the probability of another
      turn; the mean tool latency tells rest from end.
    - Costs others: prompt tokens new to the engine evict as many of its KV cache; the share of it that living sessions
      need is computed again.
    - Context lost: contexts of the engine's living sessions and this one beyond its KV cache, in proportion.

    Assumptions: a session at rest for four mean rests has ended; sessions differ by their turn alone; all turns grow
    by the mean; an engine keeps the contexts of its living sessions; a session stays where it goes now. A request
    without a session has no further turns, so the TTFT alone decides.
    """

    def __init__(self, statistics: SessionStatistics | None = None, adapter_load_tokens: float = 0.0) -> None:
        """``statistics``: of a trace of the same workload, to go on from; None: learnt from the requests alone."""
        self.statistics = SessionStatistics() if statistics is None else deepcopy(statistics)
        self._adapter_load_tokens = adapter_load_tokens
        self._sessions: dict[bytes, _Session] = {}
        self._resting: deque[tuple[float, bytes]] = deque()
        """Begin of each rest, the longest first; a session that has come back meanwhile rests no more."""
        self._residents: defaultdict[int, _Residents] = defaultdict(_Residents)

    def __call__(self, request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
        self._give_up(request.arrival_s)
        costs = predicted_ttfts_ms(request, engines, self._adapter_load_tokens)
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
            self.statistics.count(session.turn, went_on=True)
            self.statistics.rest_s.add(request.arrival_s - session.rests_since_s)
            self.statistics.growth_tokens.add(max(0.0, request.prompt_tokens - session.context_tokens))
        session.turn = request.turn or session.turn + 1
        session.in_flight += 1
        session.context_tokens = float(request.prompt_tokens)
        self._count(session, engine.place, 1.0)

    def ended(self, request: RoutedRequest, engine: RoutedEngine, now_s: float) -> None:
        session = None if request.session is None else self._sessions.get(request.session)
        if request.session is None or session is None:
            return
        self.statistics.service_s.add(now_s - request.arrival_s)
        session.in_flight -= 1
        if not session.in_flight:
            session.rests_since_s = now_s
            self._resting.append((now_s, request.session))
            self._count(session, session.place, self.statistics.another_turn(session.turn))

    def check_integrity(self) -> None:
        for place, residents in self._residents.items():
            living = [session for session in self._sessions.values() if session.place == place]
            assert abs(residents.sessions - sum(session.weight for session in living)) < 1e-6
            assert abs(residents.own_tokens - sum(session.weight * session.own_tokens for session in living)) < 1e-3
        assert {name for name, session in self._sessions.items() if not session.in_flight} <= {
            name for _, name in self._resting
        }

    def _add_later_turns(
        self, costs: list[float], request: RoutedRequest, engines: Sequence[RoutedEngine], session: _Session
    ) -> None:
        """Add, for each engine, the prefill that others lose, and the wait and lost prefill of later turns."""
        statistics, residents = self.statistics, self._residents
        ahead = statistics.turns_ahead(request.turn or session.turn + 1)
        prompt_tokens, growth_tokens = request.prompt_tokens, statistics.growth_tokens.value
        own_tokens = max(0.0, prompt_tokens - session.shared_tokens)
        turns_active = ahead * statistics.active_share
        for place, engine in enumerate(engines):
            there = residents[engine.place]
            living, tokens = there.sessions, there.own_tokens
            if session.weight and session.place == engine.place:
                living, tokens = living - session.weight, tokens - session.weight * session.own_tokens
            later_ms = 0.0
            if living > 0.0:
                later_ms = turns_active * living * prefill_ms(engine.costs, growth_tokens, prompt_tokens)
            room = engine.capacity_blocks * request.block_tokens
            if room and tokens > 0.0:
                new_tokens = uncached_tokens(request, engine)
                later_ms += min(1.0, tokens / room) * prefill_ms(engine.costs, new_tokens, 0.0)
            if 0.0 < room < tokens + own_tokens:
                lost = 1.0 - room / (tokens + own_tokens)
                later_ms += ahead * lost * prefill_ms(engine.costs, prompt_tokens, 0.0)
            costs[place] += later_ms

    def _count(self, session: _Session, place: int, weight: float) -> None:
        """Move a session's weight to the residents of ``place``."""
        before, after = self._residents[session.place], self._residents[place]
        before.count -= session.weight > 0.0
        before.sessions -= session.weight
        before.own_tokens -= session.weight * session.own_tokens
        if not before.count:  # sums of floats drift; an empty engine is empty
            before.sessions = before.own_tokens = 0.0
        session.place, session.weight = place, weight
        session.own_tokens = max(0.0, session.context_tokens - session.shared_tokens)
        after.count += weight > 0.0
        after.sessions += weight
        after.own_tokens += weight * session.own_tokens

    def _give_up(self, now_s: float) -> None:
        """Take sessions that have rested too long, or longest of too many, as ended."""
        patience_s = self.statistics.patience_s
        while self._resting and (now_s - self._resting[0][0] > patience_s or len(self._resting) > MAX_RESTING):
            rests_since_s, name = self._resting.popleft()
            session = self._sessions.get(name)
            if session is not None and not session.in_flight and session.rests_since_s == rests_since_s:
                self.statistics.count(session.turn, went_on=False)
                self._count(session, session.place, 0.0)
                del self._sessions[name]


_NEW: Final = _Session()
