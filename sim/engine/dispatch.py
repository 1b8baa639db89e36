"""Dispatch of a fleet's requests: the router's choice per request, and fleet events. mypyc compiles this module."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from math import ceil, inf

from engines.routing.records import RoutedRequest
from engines.routing.router import Router
from sim.engine.fleet import ALL_ENDED, AT_STOP, FIRST_TOKEN, NONE, Fleet
from sim.engine.fleet_events import Deploy, FleetEvent, Kill, ScaleUp
from sim.engine.simulatedrequest import NO_ENGINE

Routed = tuple[bytes | None, Sequence[int], float, int, int | None, int | None]
"""Fields of a ``RoutedRequest`` after its number and its arrival: session, block keys, tokens."""


class Dispatch:
    """Run of a fleet under a router, which chooses an engine by session, prefix cache or load."""

    def __init__(
        self, fleet: Fleet, routed: list[Routed], router: Router, *, timeline: "Timeline | None" = None
    ) -> None:
        self.fleet: Fleet = fleet
        self.router: Router = router
        self.engine_of: list[int] = [NONE] * len(fleet.requests)
        self._routed: list[Routed] = routed
        self._timeline: Timeline | None = timeline
        self._number_of: list[int] = [NONE] * len(fleet.requests)
        self._chosen: int = 0

    def run(self) -> None:
        fleet = self.fleet
        if self._timeline is not None:
            fleet.stop_ms = self._timeline.next_ms()
        index = fleet.advance()
        while index != ALL_ENDED:
            self._report_events()
            if self._timeline is not None:
                self._timeline.run_due(self)
                fleet.stop_ms = self._timeline.next_ms()
            if index == AT_STOP:
                index = fleet.advance()
                continue
            index = self._send(index)
        self._report_events()

    def _report_events(self) -> None:
        """Report first tokens and ends up to now to the router."""
        router, events = self.router, self.fleet.events
        while events.size > 0 and events.next_ms <= self.fleet.reported_until_ms:
            time_ms, code = events.next_ms, events.next_code
            events.pop()
            index = code >> 1
            if code & 1 == FIRST_TOKEN:
                router.first_token(self._number_of[index])
                continue
            router.ended(self._number_of[index], time_ms / 1e3)
            if self._timeline is not None:
                self._timeline.ended(self, self.engine_of[index], time_ms)

    def _send(self, index: int) -> int:
        """Choose an engine for the current request and send it; return the next result of ``Fleet.advance``."""
        fleet, router, timeline = self.fleet, self.router, self._timeline
        if timeline is not None:
            timeline.arrived(self)
            fleet.stop_ms = timeline.next_ms()
        request = RoutedRequest(self._chosen, fleet.now_ms / 1e3, *self._routed[index])
        engine = router.choose(request)
        if timeline is not None and not timeline.is_up(engine):
            fleet.end_here(index, NO_ENGINE)
            return fleet.advance()
        self._number_of[index] = self._chosen
        self._chosen += 1
        router.sent(request, engine)
        self.engine_of[index] = engine
        return fleet.advance(index, engine)

    def end(self, index: int) -> None:
        """Report to the router that a request's engine died."""
        self.router.ended(self._number_of[index], self.fleet.now_ms / 1e3)

    @property
    def log(self) -> list[tuple[float, str, int]]:
        """Fleet events: time in ms, event, engine."""
        return [] if self._timeline is None else self._timeline.log

    def in_flight(self, engine: int) -> int:
        """Return the number of an engine's requests in flight."""
        return self.router.engines[engine].requests


class Timeline:
    """Fleet events of a run: deaths, rolling deploys, scale-up. A started engine has a cold prefix cache."""

    def __init__(self, events: Sequence[FleetEvent], engines: int, start_ms: float) -> None:
        self._up: list[bool] = [True] * engines
        self._queue: list[tuple[float, int, Callable[[Dispatch, int, float], None], int]] = []
        self._num_events: int = 0
        self._draining: int | None = None
        self._deploy: Deploy | None = None
        self._scale: ScaleUp | None = None
        self._arrivals_ms: deque[float] = deque()
        self._started: int = engines
        self.log: list[tuple[float, str, int]] = []
        """Fleet events: time in ms, event, engine."""
        for event in events:
            if isinstance(event, Kill):
                kill = partial(self._kill, back_ms=start_ms + 1e3 * event.back_s)
                self._schedule(start_ms + 1e3 * event.at_s, kill, event.engine)
            elif isinstance(event, Deploy):
                self._deploy = event
                self._schedule(start_ms + 1e3 * event.at_s, self._drain, 0)
            else:
                self._scale, self._started = event, event.initial
                for engine in range(event.initial, engines):
                    self._schedule(start_ms, self._leave_stopped, engine)

    def is_up(self, engine: int) -> bool:
        return self._up[engine]

    def next_ms(self) -> float:
        return self._queue[0][0] if self._queue else inf

    def run_due(self, dispatch: Dispatch) -> None:
        while self.next_ms() <= dispatch.fleet.now_ms:
            at_ms, _, action, engine = heappop(self._queue)
            action(dispatch, engine, at_ms)

    def arrived(self, dispatch: Dispatch) -> None:
        if self._scale is None:
            return
        arrivals_ms, now_ms = self._arrivals_ms, dispatch.fleet.now_ms
        arrivals_ms.append(now_ms)
        while arrivals_ms[0] < now_ms - 1e3 * self._scale.window_s:
            arrivals_ms.popleft()
        target = ceil(len(arrivals_ms) / self._scale.window_s / self._scale.rate)
        while self._started < min(target, len(self._up)):
            self.log.append((now_ms, "starting", self._started))
            self._schedule(now_ms + 1e3 * self._scale.startup_s, self._start, self._started)
            self._started += 1

    def ended(self, dispatch: Dispatch, engine: int, at_ms: float) -> None:
        if engine == self._draining and dispatch.in_flight(engine) == 0:
            self._schedule_start(engine, at_ms)

    def _schedule(self, at_ms: float, action: Callable[[Dispatch, int, float], None], engine: int) -> None:
        if at_ms < inf:
            heappush(self._queue, (at_ms, self._num_events, action, engine))
            self._num_events += 1

    def _mark_down(self, dispatch: Dispatch, engine: int, at_ms: float, what: str) -> None:
        self._up[engine] = False
        dispatch.router.set_healthy(engine, False)
        self.log.append((at_ms, what, engine))

    def _leave_stopped(self, dispatch: Dispatch, engine: int, at_ms: float) -> None:
        self._mark_down(dispatch, engine, at_ms, "not started")

    def _kill(self, dispatch: Dispatch, engine: int, at_ms: float, back_ms: float) -> None:
        self._queue = [event for event in self._queue if event[2:] != (self._start, engine)]
        heapify(self._queue)
        self._schedule(back_ms, self._start, engine)
        self._mark_down(dispatch, engine, at_ms, "died")
        moved, ended = dispatch.fleet.lose(engine)
        for index in (*moved, *ended):
            dispatch.end(index)
        dispatch.router.lost_cache(engine)
        if engine == self._draining:
            self._draining = None
            self._drain_next(engine, at_ms)

    def _start(self, dispatch: Dispatch, engine: int, at_ms: float) -> None:
        if self._up[engine]:
            return
        dispatch.fleet.restart(engine, at_ms)
        dispatch.router.lost_cache(engine)
        self._up[engine] = True
        dispatch.router.set_healthy(engine, True)
        self.log.append((at_ms, "up", engine))
        if engine == self._draining:
            self._draining = None
            self._drain_next(engine, at_ms)

    def _drain(self, dispatch: Dispatch, engine: int, at_ms: float) -> None:
        if not self._up[engine]:
            self._drain_next(engine, at_ms)
            return
        self._draining = engine
        self._mark_down(dispatch, engine, at_ms, "draining")
        if dispatch.in_flight(engine) == 0:
            self._schedule_start(engine, at_ms)

    def _schedule_start(self, engine: int, at_ms: float) -> None:
        assert self._deploy is not None
        self._schedule(at_ms + 1e3 * self._deploy.startup_s, self._start, engine)

    def _drain_next(self, engine: int, at_ms: float) -> None:
        if engine + 1 < len(self._up):
            self._schedule(at_ms, self._drain, engine + 1)
