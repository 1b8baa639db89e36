"""Faults and changes of a simulated fleet: a death, a rolling deploy, engines added by the rate of arrivals.

An engine that is not up is not healthy to the router; when it is up again, its cache is cold.
"""

import argparse
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from heapq import heapify, heappop, heappush
from math import ceil
from typing import TYPE_CHECKING, Any

from tracefile.commandline.durations import duration
from tracefile.records.errors import InputError

if TYPE_CHECKING:
    from sim.engine.dispatch import Dispatch

EVENT_HELP = (
    "kill:engine=2:at=10m:back=15m, deploy:at=20m:startup=30s or scale-up:from=2:rate=1.5:window=60s:startup=45s; "
    "times from the first arrival (repeatable)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """An engine dies: requests without a token come to the router again, streams break, its cache is lost."""

    engine: int
    """Place in the fleet, from 0 on."""
    at_s: float
    back_s: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploy:
    """Each engine in turn gets no new requests, ends those it has, and starts anew."""

    at_s: float
    startup_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUp:
    """Engines are started as the rate of arrivals asks for."""

    initial: int
    """Engines up at the beginning."""
    rate: float
    """Requests a second for each engine."""
    window_s: float = 60.0
    """Time over which the rate is taken."""
    startup_s: float = 0.0


Incident = Kill | Deploy | ScaleUp
_KINDS: dict[str, tuple[type[Incident], dict[str, str]]] = {
    "kill": (Kill, {"engine": "engine", "at": "at_s", "back": "back_s"}),
    "deploy": (Deploy, {"at": "at_s", "startup": "startup_s"}),
    "scale-up": (ScaleUp, {"from": "initial", "rate": "rate", "window": "window_s", "startup": "startup_s"}),
}


def parse_event(text: str) -> Incident:
    """Read ``KIND:NAME=VALUE:…``. Raises InputError naming the word that is wrong."""
    kind, *words = text.split(":")
    if kind not in _KINDS:
        raise InputError(f"--event {text}: unknown kind {kind!r}; expected one of {', '.join(_KINDS)}")
    made, names = _KINDS[kind]
    values: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in names:
            raise InputError(f"--event {text}: {word!r}; expected some of {', '.join(f'{one}=…' for one in names)}")
        values[names[name]] = _value(text, word, names[name], value)
    needed = [name for name, field in names.items() if field in {"engine", "at_s", "initial", "rate"}]
    if missing := [name for name in needed if names[name] not in values]:
        raise InputError(f"--event {text}: no {missing[0]}; expected {kind}:{':'.join(f'{one}=…' for one in needed)}")
    found = made(**values)
    if isinstance(found, Kill) and found.back_s <= found.at_s:
        raise InputError(f"--event {text}: back is not after at; expected a later time")
    return found


def _value(text: str, word: str, field: str, value: str) -> float | int:
    try:
        found = duration(value) if field.endswith("_s") else float(value) if field == "rate" else int(value)
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise InputError(f"--event {text}: {word}: {error}") from None
    if not 0 <= found < float("inf") or (field in {"rate", "window_s", "initial"} and found == 0):
        raise InputError(f"--event {text}: {word}; expected more than 0")
    return found


def check_events(events: Sequence[Incident], engines: int) -> None:
    """Raises InputError if an event needs more engines than there are."""
    for event in events:
        if isinstance(event, Kill) and event.engine >= engines:
            raise InputError(f"--event kill: engine={event.engine}; expected 0 to {engines - 1}, the fleet's engines")
        if isinstance(event, ScaleUp) and event.initial > engines:
            raise InputError(f"--event scale-up: from={event.initial}; expected at most the fleet's {engines} engines")
    for kind in (Deploy, ScaleUp):
        if sum(isinstance(event, kind) for event in events) > 1:
            raise InputError(f"--event: {kind.__name__} twice; expected each kind but kill once")


class Timeline:
    """Events of one run, on the fleet's clock."""

    def __init__(self, events: Sequence[Incident], engines: int, start_ms: float) -> None:
        self._up = [True] * engines
        self._queue: list[tuple[float, int, Callable[[Dispatch, int, float], None], int]] = []
        self._noted = 0
        self._draining: int | None = None
        self._deploy: Deploy | None = None
        self._scale: ScaleUp | None = None
        self._came_ms: deque[float] = deque()
        self._started = engines
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
        return self._queue[0][0] if self._queue else float("inf")

    def happen(self, dispatch: "Dispatch") -> None:
        while self.next_ms() <= dispatch.fleet.now_ms:
            at_ms, _, action, engine = heappop(self._queue)
            action(dispatch, engine, at_ms)

    def arrived(self, dispatch: "Dispatch") -> None:
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

    def ended(self, dispatch: "Dispatch", engine: int, at_ms: float) -> None:
        if engine == self._draining and dispatch.in_flight(engine) == 0:
            self._emptied(dispatch, engine, at_ms)

    def _note(self, at_ms: float, action: "Callable[[Dispatch, int, float], None]", engine: int) -> None:
        if at_ms < float("inf"):
            heappush(self._queue, (at_ms, self._noted, action, engine))
            self._noted += 1

    def _take_down(self, dispatch: "Dispatch", engine: int, at_ms: float, what: str) -> None:
        self._up[engine] = False
        dispatch.set_healthy(engine, False)
        self.log.append((at_ms, what, engine))

    def _hold(self, dispatch: "Dispatch", engine: int, at_ms: float) -> None:
        self._take_down(dispatch, engine, at_ms, "not started")

    def _kill(self, dispatch: "Dispatch", engine: int, at_ms: float, back_ms: float) -> None:
        self._queue = [one for one in self._queue if one[2:] != (self._start, engine)]
        heapify(self._queue)
        self._note(back_ms, self._start, engine)
        self._take_down(dispatch, engine, at_ms, "died")
        moved, ended = dispatch.fleet.lose(engine)
        for place in (*moved, *ended):
            dispatch.end(place)
        dispatch.lost_cache(engine)
        if engine == self._draining:
            self._draining = None
            self._next_in_turn(engine, at_ms)

    def _start(self, dispatch: "Dispatch", engine: int, at_ms: float) -> None:
        if self._up[engine]:
            return
        dispatch.fleet.restart(engine, at_ms)
        dispatch.lost_cache(engine)
        self._up[engine] = True
        dispatch.set_healthy(engine, True)
        self.log.append((at_ms, "up", engine))
        if engine == self._draining:
            self._draining = None
            self._next_in_turn(engine, at_ms)

    def _drain(self, dispatch: "Dispatch", engine: int, at_ms: float) -> None:
        if not self._up[engine]:
            self._next_in_turn(engine, at_ms)
            return
        self._draining = engine
        self._take_down(dispatch, engine, at_ms, "draining")
        if dispatch.in_flight(engine) == 0:
            self._emptied(dispatch, engine, at_ms)

    def _emptied(self, dispatch: "Dispatch", engine: int, at_ms: float) -> None:
        assert self._deploy is not None
        self._note(at_ms + 1e3 * self._deploy.startup_s, self._start, engine)

    def _next_in_turn(self, engine: int, at_ms: float) -> None:
        if engine + 1 < len(self._up):
            self._note(at_ms, self._drain, engine + 1)


def settings_of(event: Incident) -> dict[str, object]:
    return {"kind": type(event).__name__, **{field.name: getattr(event, field.name) for field in fields(event)}}
