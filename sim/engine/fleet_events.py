"""Events of a simulated fleet: engine death, rolling deploy, scale-up by arrival rate.

The router sees an engine that is down as unhealthy. A restarted engine has a cold prefix cache.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from tracefile.commandline.durations import duration
from tracefile.records.errors import InputError

EVENT_HELP = (
    "kill:engine=2:at=10m:back=15m, deploy:at=20m:startup=30s or scale-up:from=2:rate=1.5:window=60s:startup=45s; "
    "times from the first arrival (repeatable)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Engine death: requests without a token arrive at the router again, streams break, the KV cache is lost."""

    engine: int
    """Index in the fleet, from 0."""
    at_s: float
    back_s: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploy:
    """Rolling deploy: each engine in turn drains its requests and restarts with a cold prefix cache."""

    at_s: float
    startup_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUp:
    """Scale-up: engines start when the arrival rate needs them."""

    initial: int
    """Engines up at the start."""
    rate: float
    """Requests per second and engine."""
    window_s: float = 60.0
    """Window of the rate, in seconds."""
    startup_s: float = 0.0


FleetEvent = Kill | Deploy | ScaleUp
_KINDS: dict[str, tuple[type[FleetEvent], dict[str, str]]] = {
    "kill": (Kill, {"engine": "engine", "at": "at_s", "back": "back_s"}),
    "deploy": (Deploy, {"at": "at_s", "startup": "startup_s"}),
    "scale-up": (ScaleUp, {"from": "initial", "rate": "rate", "window": "window_s", "startup": "startup_s"}),
}


def parse_event(text: str) -> FleetEvent:
    """Parse ``KIND:NAME=VALUE:…``. Raises InputError naming the wrong field."""
    kind, *words = text.split(":")
    if kind not in _KINDS:
        raise InputError(f"--event {text}: unknown kind {kind!r}; expected one of {', '.join(_KINDS)}")
    event_type, names = _KINDS[kind]
    values: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in names:
            raise InputError(f"--event {text}: {word!r}; expected one of {', '.join(f'{name}=…' for name in names)}")
        values[names[name]] = _value(text, word, names[name], value)
    needed = [name for name, field in names.items() if field in {"engine", "at_s", "initial", "rate"}]
    if missing := [name for name in needed if names[name] not in values]:
        raise InputError(f"--event {text}: no {missing[0]}; expected {kind}:{':'.join(f'{name}=…' for name in needed)}")
    event = event_type(**values)
    if isinstance(event, Kill) and event.back_s <= event.at_s:
        raise InputError(f"--event {text}: back is not after at; expected a later time")
    return event


def _value(text: str, word: str, field: str, value: str) -> float | int:
    try:
        number = duration(value) if field.endswith("_s") else float(value) if field == "rate" else int(value)
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise InputError(f"--event {text}: {word}: {error}") from None
    if not 0 <= number < float("inf") or (field in {"rate", "window_s", "initial"} and number == 0):
        raise InputError(f"--event {text}: {word}; expected more than 0")
    return number


def check_events(events: Sequence[FleetEvent], engines: int) -> None:
    """Raise InputError if an event names an engine that the fleet does not have."""
    for event in events:
        if isinstance(event, Kill) and event.engine >= engines:
            raise InputError(f"--event kill: engine={event.engine}; expected 0 to {engines - 1}, the fleet's engines")
        if isinstance(event, ScaleUp) and event.initial > engines:
            raise InputError(f"--event scale-up: from={event.initial}; expected at most the fleet's {engines} engines")
    for kind in (Deploy, ScaleUp):
        if sum(isinstance(event, kind) for event in events) > 1:
            raise InputError(f"--event: {kind.__name__} twice; expected each kind but kill once")


def settings_of(event: FleetEvent) -> dict[str, object]:
    return {"kind": type(event).__name__, **{field.name: getattr(event, field.name) for field in fields(event)}}
