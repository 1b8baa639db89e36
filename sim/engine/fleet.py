"""Engines of a fleet on one virtual clock: an engine runs ahead until the earliest possible new arrival.

``advance`` returns when a router has to choose an engine. Until then an engine may run to the next arrival, or to the
first time at which a session that waits for another engine can continue. So an engine is at most a scheduler step ahead
of an arrival, and schedules its requests as it would alone. mypyc compiles this module.
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
"""Returned instead of a request's index: all requests have ended; the clock is at ``stop_ms``."""
NONE: Final = -1
FIRST_TOKEN: Final = 0
END: Final = 1
"""Kinds of router events; the code of an event is 2 × request index + kind."""


class Life:
    """Engine from a cold start (empty prefix cache) to the next, with its requests in flight.

    ``factors``: noise on the API server's time, by request index.
    """

    def __init__(self, number: i64, engine: Engine, factors: BoxedVec) -> None:
        self.number: i64 = number
        """Index of the engine in the fleet."""
        self.index: i64 = NONE
        """Index among the lives of all engines."""
        self.engine: Engine = engine
        self.factors: vec[float] = factors
        self.in_flight: list[SimulatedRequest] = []
        """Requests in flight, as the router sees them."""
        self.has_served: bool = False
        self.resumes_ms: float = inf
        """Time of the engine's next event."""
        self.think_ms: float = inf
        """Shortest think time after the requests in flight: no session that waits for the engine continues before
        ``resumes_ms`` plus this time."""


class Fleet:
    """Engines that serve one workload; a request's ``index`` is its row in the workload.

    An engine serves a copy of a request, ``served``; ``life`` is the index of that engine's life. Latencies count from
    the arrival at the router. ``make_life``: creates a life of an engine with a cold prefix cache.
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
        """Current life of each engine."""
        self.now_ms: float = now_ms
        self.stop_ms: float = inf
        """Time at which ``advance`` returns at the latest."""
        self.events: EventHeap = EventHeap()
        """First tokens and ends to report to the router; complete up to ``reported_until_ms``."""
        self.reported_until_ms: float = now_ms
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
        """Schedule a request's arrival at the router."""
        self._arrivals.push(arrival_ms, request.index, request)

    def advance(self, index: i64 = NONE, engine: i64 = NONE) -> i64:
        """Send request ``index`` to an engine, and run to the next request that needs an engine. Return its index,
        ALL_ENDED or AT_STOP. Raises InputError if block hashes are not chained."""
        if index >= 0:
            self._hand_over(self.requests[index], engine)
        while True:
            until_ms = min(self._arrivals.next_ms, self.stop_ms)
            life = self._furthest_behind(until_ms)
            if life is not None:
                self._run_life(life, until_ms)
                continue
            self.reported_until_ms = until_ms
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
        """Return the prefix hit of the current request on each engine, in blocks, from the engines' own caches."""
        request = self.requests[self.coming]
        cached: list[int] = []
        for life in self.current:
            scheduler = life.engine.scheduler
            hit_tokens = scheduler.cache.look_up(request) if scheduler.accepts(request) else 0
            cached.append(int(hit_tokens // self._block_size))
        return cached

    def sent(self, index: int, blocks: Sequence[int], now_s: float) -> None:
        """No-op: ``overlaps`` reads the prefix caches."""

    def forget(self, index: int) -> None:
        """No-op: ``overlaps`` reads the prefix caches."""

    def lose(self, number: i64) -> tuple[list[int], list[int]]:
        """End an engine's life now. Return its requests without a token, which arrive at the router again, and its
        requests with tokens, which fail."""
        life = self.current[number]
        life.engine.end_fast_forward()
        requeued = self._forget_events(life)
        moved: list[int] = []
        ended: list[int] = []
        for index in sorted({*requeued, *[int(request.index) for request in life.in_flight]}):
            request = self.requests[index]
            served = request.served
            if served is None:
                continue
            served.drop_undelivered(life.engine.delivered_ms, self.now_ms)
            if served.num_delivered > 0:
                request.ttft_ms = served.first_token_ms(life.engine.delivered_ms) - request.arrival_ms
                self.end_here(index, LOST, served.num_delivered)
                ended.append(index)
            else:
                request.outcome = NO_OUTCOME
                request.num_delivered = 0
                request.ttft_ms = nan
                request.served = None
                request.life = NONE
                self.submit(request, self.now_ms)
                moved.append(index)
        self.restart(number, self.now_ms)
        return moved, ended

    def end_here(self, index: i64, outcome: i64, tokens: i64 = 0) -> None:
        """End a request now and schedule the next turns of its session."""
        request = self.requests[index]
        request.outcome = outcome
        request.num_delivered = tokens
        request.e2e_ms = self.now_ms - request.arrival_ms
        for child in request.children:
            self.submit(child, self.now_ms + child.think_ms)

    def restart(self, number: i64, at_ms: float) -> None:
        """Restart an engine with an empty prefix cache: a new life, unless this life has not served yet."""
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
        """Record a request's arrival. False: it failed before it reached an engine, and ends as recorded."""
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
        served = request.copy_for_engine()
        served.frontend_factor = life.factors[request.index]
        if self.now_ms > request.arrival_ms:  # sent again: the client has waited already
            served.abort_after_ms -= self.now_ms - request.arrival_ms
        served.arrival_ms = self.now_ms
        request.served = served
        request.life = life.index
        life.has_served = True
        engine.arrivals.push(self.now_ms, served.index, served)
        life.in_flight.append(request)
        life.resumes_ms = min(life.resumes_ms, max(self.now_ms, engine.now_ms))
        left_ms = self.now_ms + served.abort_after_ms
        if left_ms < engine.now_ms:  # the router sees the abort, even during the engine's step
            life.resumes_ms = min(life.resumes_ms, left_ms)
        life.think_ms = min(life.think_ms, request.next_think_ms)

    def _furthest_behind(self, until_ms: float) -> Life | None:
        """Return the life with the earliest event before ``until_ms``."""
        first: Life | None = None
        for life in self.current:
            if life.resumes_ms < until_ms:
                first = life
                until_ms = life.resumes_ms
        return first

    def _run_life(self, life: Life, until_ms: float) -> None:
        """Run an engine to ``until_ms``, or to the first time at which another engine may continue a session."""
        for other in self.current:
            next_turn_ms = other.resumes_ms + other.think_ms
            if other is not life and next_turn_ms < until_ms:
                until_ms = min(until_ms, nextafter(next_turn_ms, inf))
        if life.engine.server.placement == SHARED_CORE:  # an arrival during a step delays the step
            until_ms = min(until_ms, nextafter(self._next_turn_after_abort_ms(life), inf))
        done = life.engine.run(until_ms)
        life.resumes_ms = inf if done else life.engine.resumes_ms()
        if life.engine.has_updates or life.engine.is_paused():
            life.engine.has_updates = False
            life.think_ms = self._collect(life)

    def _next_turn_after_abort_ms(self, life: Life) -> float:
        """Return the first time at which a session may continue after its client's abort."""
        first_ms = inf
        for request in life.in_flight:
            served = request.served
            if served is not None and request.outcome == NO_OUTCOME and not isnan(served.abort_after_ms):
                first_ms = min(first_ms, served.arrival_ms + served.abort_after_ms + request.next_think_ms)
        return first_ms

    def _collect(self, life: Life) -> float:
        """Collect first tokens and ends of requests; return the shortest think time after requests in flight."""
        engine = life.engine
        in_flight: list[SimulatedRequest] = []
        least_ms = inf
        for request in life.in_flight:
            served = request.served
            if served is None:
                continue
            if request.num_delivered == 0 and served.num_delivered > 0:
                request.num_delivered = 1
                self._push_event(served.first_token_ms(engine.delivered_ms), request, FIRST_TOKEN)
            if served.outcome == NO_OUTCOME:
                in_flight.append(request)
                if request.outcome == NO_OUTCOME and self._aborts_during_pause(engine, served):
                    request.outcome = ABORTED
                    request.e2e_ms = served.arrival_ms - request.arrival_ms + served.abort_after_ms
                    self._end(request)
                if request.outcome == NO_OUTCOME:
                    least_ms = min(least_ms, request.next_think_ms)
                continue
            moved_ms = served.arrival_ms - request.arrival_ms
            was_aborted = request.outcome == ABORTED
            request.outcome = served.outcome
            request.num_delivered = served.num_delivered
            request.ttft_ms = served.ttft_ms + moved_ms
            request.e2e_ms = served.e2e_ms + moved_ms
            if not was_aborted:
                self._end(request)
        life.in_flight = in_flight
        return least_ms

    def _aborts_during_pause(self, engine: Engine, served: SimulatedRequest) -> bool:
        """Return whether the client aborts before a paused step continues: no token can end the request before."""
        if not engine.is_paused() or isnan(served.abort_after_ms):
            return False
        return served.arrival_ms + served.abort_after_ms < engine.server.resumes_ms

    def _end(self, request: SimulatedRequest) -> None:
        self._push_event(request.end_ms(), request, END)
        push_next_turns(self._arrivals, request)

    def _push_event(self, time_ms: float, request: SimulatedRequest, kind: i64) -> None:
        self.events.push(time_ms, 2 * request.index + kind, request)

    def _forget_events(self, life: Life) -> list[int]:
        """Drop a life's pending router events and the next turns; return the indices of these requests."""
        requeued: list[int] = []
        events = EventHeap()
        while self.events.size > 0:
            time_ms, code = self.events.next_ms, self.events.next_code
            request = self.events.pop()
            if request.life == life.index and request.outcome != UNSERVABLE:
                requeued.append(int(request.index))
            else:
                events.push(time_ms, code, request)
        self.events = events
        dropped_turns: set[int] = set()
        for index in requeued:
            for child in self.requests[index].children:
                dropped_turns.add(int(child.index))
        arrivals = EventHeap()
        while self._arrivals.size > 0:
            time_ms = self._arrivals.next_ms
            request = self._arrivals.pop()
            if int(request.index) not in dropped_turns:
                arrivals.push(time_ms, request.index, request)
        self._arrivals = arrivals
        return requeued
