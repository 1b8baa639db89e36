"""Requests of a fleet on their way through a router: what it sees and what it chooses. mypyc compiles this module."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from math import ceil, inf

from engines.routing.records import RoutedRequest
from engines.routing.router import Router
from sim.engine.fleet import ALL_ENDED, AT_STOP, FIRST_TOKEN, NONE, Fleet
from sim.engine.fleet_events import Deploy, Incident, Kill, ScaleUp
from sim.engine.simulatedrequest import NO_ENGINE

Routed = tuple[bytes | None, Sequence[int], float, int, int | None, int | None]
"""Fields of a ``RoutedRequest`` behind its number and its arrival."""


class Dispatch:
    """A run of a fleet under a router."""

    def __init__(
        self, fleet: Fleet, routed: list[Routed], router: Router, *, incidents: "Timeline | None" = None
    ) -> None:
        self.fleet: Fleet = fleet
        self.router: Router = router
        self.engine_of: list[int] = [NONE] * len(fleet.requests)
        self._routed: list[Routed] = routed
        self._incidents: Timeline | None = incidents
        self._number_of: list[int] = [NONE] * len(fleet.requests)
        self._chosen: int = 0

    def run(self) -> None:
        fleet = self.fleet
        if self._incidents is not None:
            fleet.stop_ms = self._incidents.next_ms()
        index = fleet.advance()
        while index != ALL_ENDED:
            self._tell()
            if self._incidents is not None:
                self._incidents.happen(self)
                fleet.stop_ms = self._incidents.next_ms()
            if index == AT_STOP:
                index = fleet.advance()
                continue
            index = self._send(index)
        self._tell()

    def _tell(self) -> None:
        """Tell the router of first tokens and ends up to now."""
        router, events = self.router, self.fleet.events
        while events.size > 0 and events.next_ms <= self.fleet.known_ms:
            time_ms, code = events.next_ms, events.next_code
            events.pop()
            index = code >> 1
            if code & 1 == FIRST_TOKEN:
                router.first_token(self._number_of[index])
                continue
            router.ended(self._number_of[index], time_ms / 1e3)
            if self._incidents is not None:
                self._incidents.ended(self, self.engine_of[index], time_ms)

    def _send(self, index: int) -> int:
        """Choose an engine for the request that has just come; return where the fleet stops next."""
        fleet, router, incidents = self.fleet, self.router, self._incidents
        if incidents is not None:
            incidents.arrived(self)
            fleet.stop_ms = incidents.next_ms()
        request = RoutedRequest(self._chosen, fleet.now_ms / 1e3, *self._routed[index])
        engine = router.choose(request)
        if incidents is not None and not incidents.is_up(engine):
            fleet.end_here(index, NO_ENGINE)
            return fleet.advance()
        self._number_of[index] = self._chosen
        self._chosen += 1
        router.sent(request, engine)
        self.engine_of[index] = engine
        return fleet.advance(index, engine)

    def end(self, index: int) -> None:
        """Close the account of a request whose engine died."""
        self.router.ended(self._number_of[index], self.fleet.now_ms / 1e3)

    @property
    def log(self) -> list[tuple[float, str, int]]:
        """Times in ms, what happened, and the engine."""
        return [] if self._incidents is None else self._incidents.log

    def in_flight(self, engine: int) -> int:
        """Count the requests sent to an engine and not ended."""
        return self.router.engines[engine].requests


class Timeline:
    """Events of one run, on the fleet's clock."""

    def __init__(self, events: Sequence[Incident], engines: int, start_ms: float) -> None:
        self._up: list[bool] = [True] * engines
        self._queue: list[tuple[float, int, Callable[[Dispatch, int, float], None], int]] = []
        self._noted: int = 0
        self._draining: int | None = None
        self._deploy: Deploy | None = None
        self._scale: ScaleUp | None = None
        self._came_ms: deque[float] = deque()
        self._started: int = engines
        self.log: list[tuple[float, str, int]] = []
        """Times in ms, what happened, and the engine."""
        for event in events:
            if isinstance(event, Kill):
                kill = partial(self._kill, back_ms=start_ms + 1e3 * event.back_s)
                self._note(start_ms + 1e3 * event.at_s, kill, event.engine)
            elif isinstance(event, Deploy):
                self._deploy = event
                self._note(start_ms + 1e3 * event.at_s, self._drain, 0)
            else:
                self._scale, self._started = event, event.initial
                for engine in range(event.initial, engines):
                    self._note(start_ms, self._hold, engine)

    def is_up(self, engine: int) -> bool:
        return self._up[engine]

    def next_ms(self) -> float:
        return self._queue[0][0] if self._queue else inf

    def happen(self, dispatch: Dispatch) -> None:
        while self.next_ms() <= dispatch.fleet.now_ms:
            at_ms, _, action, engine = heappop(self._queue)
            action(dispatch, engine, at_ms)

    def arrived(self, dispatch: Dispatch) -> None:
        if self._scale is None:
            return
        came_ms, now_ms = self._came_ms, dispatch.fleet.now_ms
        came_ms.append(now_ms)
        while came_ms[0] < now_ms - 1e3 * self._scale.window_s:
            came_ms.popleft()
        wanted = ceil(len(came_ms) / self._scale.window_s / self._scale.rate)
        while self._started < min(wanted, len(self._up)):
            self.log.append((now_ms, "starting", self._started))
            self._note(now_ms + 1e3 * self._scale.startup_s, self._start, self._started)
            self._started += 1

    def ended(self, dispatch: Dispatch, engine: int, at_ms: float) -> None:
        if engine == self._draining and dispatch.in_flight(engine) == 0:
            self._emptied(engine, at_ms)

    def _note(self, at_ms: float, action: Callable[[Dispatch, int, float], None], engine: int) -> None:
        if at_ms < inf:
            heappush(self._queue, (at_ms, self._noted, action, engine))
            self._noted += 1

    def _take_down(self, dispatch: Dispatch, engine: int, at_ms: float, what: str) -> None:
        self._up[engine] = False
        dispatch.router.set_healthy(engine, False)
        self.log.append((at_ms, what, engine))

    def _hold(self, dispatch: Dispatch, engine: int, at_ms: float) -> None:
        self._take_down(dispatch, engine, at_ms, "not started")

    def _kill(self, dispatch: Dispatch, engine: int, at_ms: float, back_ms: float) -> None:
        self._queue = [event for event in self._queue if event[2:] != (self._start, engine)]
        heapify(self._queue)
        self._note(back_ms, self._start, engine)
        self._take_down(dispatch, engine, at_ms, "died")
        moved, ended = dispatch.fleet.lose(engine)
        for index in (*moved, *ended):
            dispatch.end(index)
        dispatch.router.lost_cache(engine)
        if engine == self._draining:
            self._draining = None
            self._next_in_turn(engine, at_ms)

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
            self._next_in_turn(engine, at_ms)

    def _drain(self, dispatch: Dispatch, engine: int, at_ms: float) -> None:
        if not self._up[engine]:
            self._next_in_turn(engine, at_ms)
            return
        self._draining = engine
        self._take_down(dispatch, engine, at_ms, "draining")
        if dispatch.in_flight(engine) == 0:
            self._emptied(engine, at_ms)

    def _emptied(self, engine: int, at_ms: float) -> None:
        assert self._deploy is not None
        self._note(at_ms + 1e3 * self._deploy.startup_s, self._start, engine)

    def _next_in_turn(self, engine: int, at_ms: float) -> None:
        if engine + 1 < len(self._up):
            self._note(at_ms, self._drain, engine + 1)
