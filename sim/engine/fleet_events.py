"""Faults and changes of a simulated fleet: a death, a rolling deploy, engines added by the rate of arrivals.

An engine that is not up is not healthy to the router; when it is up again, its cache is cold.
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
            raise InputError(f"--event {text}: {word!r}; expected some of {', '.join(f'{name}=…' for name in names)}")
        values[names[name]] = _value(text, word, names[name], value)
    needed = [name for name, field in names.items() if field in {"engine", "at_s", "initial", "rate"}]
    if missing := [name for name in needed if names[name] not in values]:
        raise InputError(f"--event {text}: no {missing[0]}; expected {kind}:{':'.join(f'{name}=…' for name in needed)}")
    event = made(**values)
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


def settings_of(event: Incident) -> dict[str, object]:
    return {"kind": type(event).__name__, **{field.name: getattr(event, field.name) for field in fields(event)}}
