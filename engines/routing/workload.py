"""Workload-aware policy: a session goes where its next turns, too, will find their cache and a free engine."""

from collections import defaultdict, deque
from typing import Final

import msgspec

from engines.routing.costs import predicted_ttfts_ms, prefill_ms
from engines.routing.load import least_costly
from engines.routing.records import RoutedEngine, RoutedRequest, uncached_tokens

MAX_RESTING = 1 << 17
"""Rests that are remembered; of more the longest count as ends."""
MAX_TURN = 64
"""Turns counted apart; later ones together."""
PRIOR_SESSIONS = 4.0
"""Weight of the mean over all turns in the estimate for one turn, in sessions."""
TURNS_AHEAD = 3
"""Turns that a router looks ahead."""


class _Mean:
    """Mean of the values so far; the first of them is the prior."""

    __slots__ = ("count", "value")

    def __init__(self, prior: float) -> None:
        self.value, self.count = prior, 1

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / self.count


class SessionStatistics:
    """Learnt from sessions as they go on and end; begun from weak priors."""

    def __init__(self) -> None:
        self._turns = [[0, 0] for _ in range(MAX_TURN + 1)]
        """By turn: sessions that ended with it, and that went on."""
        self.all_turns = [0, 0]
        self.rest_s = _Mean(10.0)
        """Time from a turn's end to the next turn's arrival: tools and people."""
        self.service_s = _Mean(2.0)
        """Time from a request's sending to its end."""
        self.growth_tokens = _Mean(500.0)
        """Prompt tokens that a turn adds to the one before."""

    def count(self, turn: int, *, went_on: bool) -> None:
        """Count a turn whose session went on to another one, or ended with it."""
        self._turns[min(turn, MAX_TURN)][went_on] += 1
        self.all_turns[went_on] += 1

    def another_turn(self, turn: int) -> float:
        """Return the probability that a session goes on after its turn ``turn``, from 1 on."""
        overall = (self.all_turns[True] + 1.0) / (sum(self.all_turns) + 2.0)
        ended, went_on = self._turns[min(turn, MAX_TURN)]
        return (went_on + PRIOR_SESSIONS * overall) / (went_on + ended + PRIOR_SESSIONS)

    def turns_ahead(self, turn: int) -> float:
        """Return the expected number of turns after ``turn``, of the next ``TURNS_AHEAD``."""
        expected, reached = 0.0, 1.0
        for later in range(turn, turn + TURNS_AHEAD):
            reached *= self.another_turn(later)
            expected += reached
        return expected

    @property
    def patience_s(self) -> float:
        """Rest after which a session counts as ended: four mean rests, 2 % of exponential ones."""
        return 4.0 * self.rest_s.value

    @property
    def active_share(self) -> float:
        """Share of a living session's time in which a request of it is in flight."""
        whole = self.service_s.value + self.rest_s.value
        return self.service_s.value / whole if whole > 0.0 else 1.0


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

    Priors: a session at rest for four mean rests has ended; sessions differ by their turn alone; all turns grow
    by the mean; an engine keeps the contexts of its living sessions; a session stays where it goes now. A request
    without a session has no further turns, so the TTFT alone decides.
    """

    def __init__(self) -> None:
        self.statistics = SessionStatistics()
        self._sessions: dict[bytes, _Session] = {}
        self._resting: deque[tuple[float, bytes]] = deque()
        """Begin of each rest, the longest first; a session that has come back meanwhile rests no more."""
        self._residents: defaultdict[int, _Residents] = defaultdict(_Residents)

    def __call__(self, request: RoutedRequest, engines: list[RoutedEngine]) -> int:
        self._give_up(request.arrival_s)
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

    def _add_later_turns(
        self, costs: list[float], request: RoutedRequest, engines: list[RoutedEngine], session: _Session
    ) -> None:
        """Add, for each engine, the prefill that others lose, and the wait and lost prefill of later turns."""
        statistics, prompt_tokens = self.statistics, request.prompt_tokens
        ahead = statistics.turns_ahead(request.turn or session.turn + 1)
        own_tokens = max(0.0, prompt_tokens - session.shared_tokens)
        for place, engine in enumerate(engines):
            there = self._residents[engine.place]
            living, tokens = there.sessions, there.own_tokens
            if session.weight and session.place == engine.place:
                living, tokens = living - session.weight, tokens - session.weight * session.own_tokens
            turn_ms = prefill_ms(engine.costs, statistics.growth_tokens.value, prompt_tokens)
            costs[place] += ahead * statistics.active_share * max(0.0, living) * turn_ms
            room = engine.capacity_blocks * request.block_tokens
            if room:
                new_tokens = uncached_tokens(request, engine)
                costs[place] += min(1.0, max(0.0, tokens) / room) * prefill_ms(engine.costs, new_tokens, 0.0)
                lost = max(0.0, 1.0 - room / max(room, tokens + own_tokens))
                costs[place] += ahead * lost * prefill_ms(engine.costs, prompt_tokens, 0.0)

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
