"""Engines of a fleet in one virtual clock: each runs as far as no request can come to it that is not known yet.

``advance`` returns where a router has to choose an engine. Until then an engine may run to the next arrival, or to the
first moment at which a session can go on that waits for another engine. So none is ever ahead of an arrival by more
than the step that the arrival has to wait for, and each does what it would do alone with the requests that it gets.
mypyc compiles this module.
"""

from collections.abc import Callable, Sequence
from math import inf, isnan, nan, nextafter
from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from measure.cache.hashtable import BoxedVec
from sim.engine.apiserver import SHARED_CORE
from sim.engine.eventheap import EventHeap, push_first_turns, push_next_turns
from sim.engine.loop import Engine
from sim.engine.simulatedrequest import (
    ABORTED,
    AS_RECORDED,
    LOST,
    NO_OUTCOME,
    UNSERVABLE,
    SimulatedRequest,
)

ALL_ENDED: Final = -1
AT_STOP: Final = -2
"""Returned in place of a request: all have ended; the clock is at ``stop_ms``."""
NONE: Final = -1
FIRST_TOKEN: Final = 0
END: Final = 1
"""Kinds of what a router is told of a request; a code is 2 × place + kind."""


class Life:
    """An engine from one cold start to the next, and the requests in flight in it.

    ``factors``: of noise on the API server's time, by place of the request.
    """

    def __init__(self, number: i64, engine: Engine, factors: BoxedVec) -> None:
        self.number: i64 = number
        """Place of the engine in the fleet."""
        self.index: i64 = NONE
        """Place among the lives of all engines."""
        self.engine: Engine = engine
        self.factors: vec[float] = factors
        self.in_flight: list[SimulatedRequest] = []
        """Requests as the router has them."""
        self.has_served: bool = False
        self.resumes_ms: float = inf
        """Nothing happens in the engine before."""
        self.think_ms: float = inf
        """Shortest think time after the requests in flight: no session that waits for the engine goes on before
        ``resumes_ms`` and this time."""


class Fleet:
    """A run of engines that share a workload; the index of a request is its place in it.

    A request is served by a copy of it, ``served``, in the engine that it was handed to; ``life`` is the number of that
    engine's life. Times of a request count from its arrival at the router. ``make_life``: makes the life of that number
    of an engine, cold.
    """

    def __init__(
        self,
        requests: list[SimulatedRequest],
        engines: i64,
        make_life: Callable[[i64, i64], Life],
        *,
        block_size: i64,
        now_ms: float,
    ) -> None:
        self.requests: list[SimulatedRequest] = requests
        self.lives: list[Life] = []
        self.current: list[Life] = []
        """Each engine's life now."""
        self.now_ms: float = now_ms
        self.stop_ms: float = inf
        """Where ``advance`` returns in any case."""
        self.events: EventHeap = EventHeap()
        """First tokens and ends that the router was not told yet; up to ``known_ms`` none is missing."""
        self.known_ms: float = now_ms
        self.coming: i64 = NONE
        """Request that ``advance`` returned last."""
        self._block_size: i64 = block_size
        self._make_life: Callable[[i64, i64], Life] = make_life
        self._arrivals: EventHeap = EventHeap()
        for number in range(engines):
            self._begin_life(number)
        for request in requests:
            for child in request.children:
                request.next_think_ms = min(request.next_think_ms, child.think_ms)
        push_first_turns(self._arrivals, requests)

    def submit(self, request: SimulatedRequest, arrival_ms: float) -> None:
        """Let a request arrive at the router."""
        self._arrivals.push(arrival_ms, request.index, request)

    def advance(self, index: i64 = NONE, engine: i64 = NONE) -> i64:
        """Hand the request at ``place`` over to an engine, and run to the next one that needs an engine. Return its
        place, or why there is none. Raises InputError if hashes are not chained."""
        if index >= 0:
            self._hand_over(self.requests[index], engine)
        while True:
            until_ms = min(self._arrivals.next_ms, self.stop_ms)
            life = self._furthest_behind(until_ms)
            if life is not None:
                self._run_life(life, until_ms)
                continue
            self.known_ms = until_ms
            if until_ms == inf:
                return ALL_ENDED
            self.now_ms = until_ms
            if self.stop_ms <= self._arrivals.next_ms:
                return AT_STOP
            request = self._arrivals.pop()
            self.coming = request.index
            if self._needs_engine(request):
                return request.index

    def overlaps(self, blocks: Sequence[int], now_s: float) -> list[int]:
        """Return, by engine, the leading blocks cached of the request that has just come: complete knowledge."""
        request = self.requests[self.coming]
        cached: list[int] = []
        for life in self.current:
            scheduler = life.engine.scheduler
            hit_tokens = scheduler.cache.look_up(request) if scheduler.accepts(request) else 0
            cached.append(int(hit_tokens // self._block_size))
        return cached

    def sent(self, index: int, blocks: Sequence[int], now_s: float) -> None:
        """Learn nothing: the caches tell."""

    def forget(self, index: int) -> None:
        """Learn nothing: the caches tell."""

    def lose(self, number: i64) -> tuple[list[int], list[int]]:
        """End an engine's life now; return its requests that come to the router again, having no token yet, and those
        that end here."""
        life = self.current[number]
        life.engine.end_repeat()
        undone = self._forget_events(life)
        moved: list[int] = []
        ended: list[int] = []
        for index in sorted({*undone, *[int(request.index) for request in life.in_flight]}):
            request = self.requests[index]
            served = request.served
            if served is None:
                continue
            served.forget_unseen(life.engine.seen_ms, self.now_ms)
            if served.num_seen > 0:
                request.ttft_ms = served.first_seen_ms(life.engine.seen_ms) - request.arrival_ms
                self.end_here(index, LOST, served.num_seen)
                ended.append(index)
            else:
                request.outcome = NO_OUTCOME
                request.num_seen = 0
                request.ttft_ms = nan
                request.served = None
                request.life = NONE
                self.submit(request, self.now_ms)
                moved.append(index)
        self.restart(number, self.now_ms)
        return moved, ended

    def end_here(self, index: i64, outcome: i64, tokens: i64 = 0) -> None:
        """End a request now; its session goes on."""
        request = self.requests[index]
        request.outcome = outcome
        request.num_seen = tokens
        request.e2e_ms = self.now_ms - request.arrival_ms
        for child in request.children:
            self.submit(child, self.now_ms + child.think_ms)

    def restart(self, number: i64, at_ms: float) -> None:
        """Let an engine begin at ``at_ms`` with nothing cached: a new life, unless it has not served in this one."""
        life = self.current[number]
        if life.engine.num_steps == 0 and not life.has_served:
            life.engine.now_ms = at_ms
            return
        self._begin_life(number)
        self.current[number].engine.now_ms = at_ms

    def _begin_life(self, number: i64) -> None:
        life = self._make_life(number, len(self.lives))
        life.index = len(self.lives)
        self.lives.append(life)
        if number < i64(len(self.current)):
            self.current[number] = life
        else:
            self.current.append(life)

    def _needs_engine(self, request: SimulatedRequest) -> bool:
        """Note the arrival of a request; one that failed before it got to an engine ends as recorded."""
        if isnan(request.entry_ms):
            request.arrival_ms = self.now_ms
            request.entry_ms = self.now_ms
        if not request.is_as_recorded:
            return True
        request.e2e_ms = request.recorded_e2e_ms
        request.outcome = AS_RECORDED
        push_next_turns(self._arrivals, request)
        return False

    def _hand_over(self, request: SimulatedRequest, number: i64) -> None:
        life = self.current[number]
        engine = life.engine
        served = request.again()
        served.frontend_factor = life.factors[request.index]
        if self.now_ms > request.arrival_ms:  # its client has waited already
            served.abort_after_ms -= self.now_ms - request.arrival_ms
        served.arrival_ms = self.now_ms
        request.served = served
        request.life = life.index
        life.has_served = True
        engine.arrivals.push(self.now_ms, served.index, served)
        life.in_flight.append(request)
        life.resumes_ms = min(life.resumes_ms, max(self.now_ms, engine.now_ms))
        left_ms = self.now_ms + served.abort_after_ms
        if left_ms < engine.now_ms:  # the router sees that the client goes, even during the engine's step
            life.resumes_ms = min(life.resumes_ms, left_ms)
        life.think_ms = min(life.think_ms, request.next_think_ms)

    def _furthest_behind(self, until_ms: float) -> Life | None:
        """Return the life that has something to do before all others and before ``until_ms``."""
        first: Life | None = None
        for life in self.current:
            if life.resumes_ms < until_ms:
                first = life
                until_ms = life.resumes_ms
        return first

    def _run_life(self, life: Life, until_ms: float) -> None:
        """Run an engine to ``until_ms``, or to where another one may let a session go on."""
        for other in self.current:
            goes_on_ms = other.resumes_ms + other.think_ms
            if other is not life and goes_on_ms < until_ms:
                until_ms = min(until_ms, nextafter(goes_on_ms, inf))
        if life.engine.server.placement == SHARED_CORE:  # a turn that comes during a step delays the step
            until_ms = min(until_ms, nextafter(self._after_leaving_ms(life), inf))
        done = life.engine.run(until_ms)
        life.resumes_ms = inf if done else life.engine.resumes_ms()
        if life.engine.has_news or life.engine.is_paused():
            life.engine.has_news = False
            life.think_ms = self._collect(life)

    def _after_leaving_ms(self, life: Life) -> float:
        """Return the first time at which a session may go on whose client goes before its answer's end."""
        first_ms = inf
        for request in life.in_flight:
            served = request.served
            if served is not None and request.outcome == NO_OUTCOME and not isnan(served.abort_after_ms):
                first_ms = min(first_ms, served.arrival_ms + served.abort_after_ms + request.next_think_ms)
        return first_ms

    def _collect(self, life: Life) -> float:
        """Note first tokens and ends of an engine's requests; return the shortest think time after those in flight."""
        engine = life.engine
        kept: list[SimulatedRequest] = []
        least_ms = inf
        for request in life.in_flight:
            served = request.served
            if served is None:
                continue
            if request.num_seen == 0 and served.num_seen > 0:
                request.num_seen = 1
                self._note(served.first_seen_ms(engine.seen_ms), request, FIRST_TOKEN)
            if served.outcome == NO_OUTCOME:
                kept.append(request)
                if request.outcome == NO_OUTCOME and self._leaves_during_pause(engine, served):
                    request.outcome = ABORTED
                    request.e2e_ms = served.arrival_ms - request.arrival_ms + served.abort_after_ms
                    self._end(request)
                if request.outcome == NO_OUTCOME:
                    least_ms = min(least_ms, request.next_think_ms)
                continue
            moved_ms = served.arrival_ms - request.arrival_ms
            was_left = request.outcome == ABORTED
            request.outcome = served.outcome
            request.num_seen = served.num_seen
            request.ttft_ms = served.ttft_ms + moved_ms
            request.e2e_ms = served.e2e_ms + moved_ms
            if not was_left:
                self._end(request)
        life.in_flight = kept
        return least_ms

    def _leaves_during_pause(self, engine: Engine, served: SimulatedRequest) -> bool:
        """Return whether the client goes before a step that pauses goes on: nothing can end the request before."""
        if not engine.is_paused() or isnan(served.abort_after_ms):
            return False
        return served.arrival_ms + served.abort_after_ms < engine.server.resumes_ms

    def _end(self, request: SimulatedRequest) -> None:
        self._note(request.end_ms(), request, END)
        push_next_turns(self._arrivals, request)

    def _note(self, time_ms: float, request: SimulatedRequest, kind: i64) -> None:
        self.events.push(time_ms, 2 * request.index + kind, request)

    def _forget_events(self, life: Life) -> list[int]:
        """Forget what the router was to be told of a life later, and the turns that would follow; return the places of
        these requests."""
        undone: list[int] = []
        events = EventHeap()
        while self.events.size > 0:
            time_ms, code = self.events.next_ms, self.events.next_code
            request = self.events.pop()
            if request.life == life.index and request.outcome != UNSERVABLE:
                undone.append(int(request.index))
            else:
                events.push(time_ms, code, request)
        self.events = events
        early: set[int] = set()
        for index in undone:
            for child in self.requests[index].children:
                early.add(int(child.index))
        arrivals = EventHeap()
        while self._arrivals.size > 0:
            time_ms = self._arrivals.next_ms
            request = self._arrivals.pop()
            if int(request.index) not in early:
                arrivals.push(time_ms, request.index, request)
        self._arrivals = arrivals
        return undone
