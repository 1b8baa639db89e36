"""Scenarios of a what-if: changes to KV cache, scheduler, rate or fleet, read from flags."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from engines.routing.routes import parse_route
from report.output import add_page_argument
from sim.engine.deployment import DEPLOYMENT_FLAGS, Deployment, integer, positive, refuse_alone
from sim.engine.fleet_events import parse_event
from sim.engine.fleetplan import CAPTURED, add_fleet_flags, replicas_of
from tracefile.commandline.parser import Parser, seed
from tracefile.records.errors import InputError

RARE = ("host-gb-per-s", "host-latency")
"""Axes whose values a file of ``--config`` or a grid gives alone."""
MOST_SCENARIOS = 200
BASELINE = "as captured"


@dataclass(frozen=True, slots=True)
class Scenario:
    """Differences from the capture: engine settings, rate factor, cold prompts (no shared prefix block), fleet."""

    settings: Mapping[str, Any]
    rate: float = 1.0
    cold_prompts: bool = False
    replicas: int | None = None
    """None: the engines of the capture."""
    route: str | None = None
    """None: as captured with its engines, else round-robin."""
    events: tuple[str, ...] = ()
    deployment: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``Deployment`` that are not its defaults."""

    @property
    def differences(self) -> dict[str, int | float | str | bool]:
        names = ("replicas", "route")
        fleet = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(AS_CAPTURED, name)}
        events = {"events": ", ".join(self.events)} if self.events else {}
        return {**self.settings, **self.deployment, **fleet, **events}

    @property
    def name(self) -> str:
        return self.name_beside(AS_CAPTURED) or BASELINE

    def name_beside(self, base: "Scenario") -> str:
        pairs = [(axis, axis.value_in(self), axis.value_in(base)) for axis in AXES]
        differ = [(axis, value) for axis, value, before in pairs if value != before]
        return ", ".join(
            (axis.describe(value) if value is not None else "") or f"no {axis.name}" for axis, value in differ
        )


AS_CAPTURED = Scenario({})


def add_scenario_flags(parser: Parser) -> None:
    different = parser.add_argument_group("scenario", "N,N,… are several scenarios; several flags are combined")
    for axis in AXES:
        if axis.kind is bool:
            different.add_argument(axis.flag, action="store_true", help=axis.help)
        elif axis.help:
            default = "" if "default" in axis.help else " (default: the capture's)"
            add = parser.add_setting if axis.name in RARE else different.add_argument
            add(axis.flag, metavar=f"{axis.metavar},…", help=f"{axis.help}{default}")
    add_fleet_flags(parser, several=True)


def add_capture_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="the capture; never one that the model was fitted on")
    parser.add_argument("--latency-model", type=Path, required=True, help="model.json from sim calibrate")
    add_page_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    parser.add_argument(
        "--members",
        type=int,
        default=32,
        help="forecasts per scenario, each with drawn parameters and noise; more: finer intervals",
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of the members and their noise")


def checked_members(members: int) -> int:
    if members < 2:
        raise InputError(f"--members: {members}; expected 2 or more")
    return members


def scenarios_of(arguments: argparse.Namespace, base: Scenario = AS_CAPTURED, searched: str = "") -> list[Scenario]:
    """Return all combinations of flag values over ``base``; ``searched``: an axis whose values come later.

    Raises InputError naming the invalid flag.
    """
    choices = {axis: values for axis in AXES if (values := _flag_values(axis, arguments))}
    refuse_alone({searched, *(axis.name for axis in choices), *axes_in(base)})
    count = prod(map(len, choices.values()))
    if count > MOST_SCENARIOS:
        raise InputError(f"{count} scenarios, all combinations; expected at most {MOST_SCENARIOS}")
    return [scenario for scenario in combinations(choices, base) if scenario.name_beside(base)]


def axes_in(scenario: Scenario) -> list[str]:
    return [axis.name for axis in AXES if axis.value_in(scenario) != axis.value_in(AS_CAPTURED)]


def _flag_values(axis: "Axis", arguments: argparse.Namespace) -> list[Any]:
    flag_value = getattr(arguments, axis.name.replace("-", "_"))
    if not flag_value or axis.kind is bool:
        return [axis.on] if flag_value else []
    if isinstance(flag_value, list):
        return [tuple(flag_value)]
    return [axis.read(axis.flag, word) for word in _words(axis.flag, flag_value)]


def combinations(choices: Mapping["Axis", Sequence[Any]], base: Scenario) -> Iterator[Scenario]:
    """Yield all combinations of values over ``base``; the last axis changes first."""
    for values in product(*choices.values()):
        scenario = base
        for axis, value in zip(choices, values, strict=True):
            scenario = axis.put(scenario, value)
        yield scenario


def parse_base(text: str) -> Scenario:
    """Parse ``--base``: NAME=VALUE,… or the name of a switch. Raises InputError naming the invalid word."""
    base = AS_CAPTURED
    for word in _words("--base", text):
        name, _, value = word.partition("=")
        axis = AXIS_OF.get(name)
        if axis is None or (axis.kind is bool and word != name):
            expected = [key if other.kind is bool else f"{key}={other.metavar}" for key, other in AXIS_OF.items()]
            raise InputError(f"--base: {word!r}; expected some of {', '.join(expected)}")
        base = axis.put(base, axis.on if axis.kind is bool else axis.read(f"--base {name}", value))
    return base


def _words(flag: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words) or len(set(words)) < len(words):
        raise InputError(f"{flag}: {text!r}; expected different values separated by commas")
    return words


def _route(flag: str, word: str) -> str:
    if word != CAPTURED:
        parse_route(word)
    return word


def _events(flag: str, word: str) -> tuple[str, ...]:
    """Return an event; an empty word means no event."""
    if not word:
        return ()
    parse_event(word)
    return (word,)


INTEGER = integer(0)


@dataclass(frozen=True, slots=True)
class Axis:
    """Setting that scenarios change: a flag, a name in ``--base`` and a key of a grid."""

    name: str
    kind: type
    """Type of a value in a grid. A ``bool`` is a flag without a value."""
    metavar: str = ""
    help: str = ""
    """Empty: its flag is one of ``add_fleet_flags``."""
    read: Callable[[str, str], Any] = INTEGER
    """Value of a word after the flag's name. Raises InputError."""
    field: str = ""
    """Field of the engine's settings, of ``Deployment`` or of ``Scenario``; empty: as named."""
    on: bool = True
    """Value of a ``bool`` that is given."""
    words: Callable[[Any], str] | None = None
    """Value in words; None: after the name."""

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def target_field(self) -> str:
        return self.field or self.name.replace("-", "_")

    def describe(self, value: Any) -> str:
        return f"{self.name} {value}" if self.words is None else self.words(value)

    def value_in(self, scenario: Scenario) -> Any:
        target = self.target_field
        if target in Scenario.__dataclass_fields__:
            return getattr(scenario, target)
        return (scenario.deployment if target in Deployment.__dataclass_fields__ else scenario.settings).get(target)

    def put(self, scenario: Scenario, value: Any) -> Scenario:
        target = self.target_field
        if target in Scenario.__dataclass_fields__:
            return replace(scenario, **{target: value})
        if target in Deployment.__dataclass_fields__:
            return replace(scenario, deployment={**scenario.deployment, target: value})
        return replace(scenario, settings={**scenario.settings, target: value})


AXES = (
    Axis("cold-prompts", bool, help="no prompt shares a prefix block", words=lambda on: "cold prompts" * on),
    Axis(
        "rate",
        float,
        "X",
        "factor of the captured rate; think times do not change",
        positive,
        words=lambda rate: f"rate ×{rate:g}",
    ),
    Axis("num-gpu-blocks", int, "N", "KV blocks, the null block included"),
    Axis("max-num-seqs", int, "N", "most requests in a batch"),
    Axis("max-num-batched-tokens", int, "N", "token budget of a step"),
    Axis("block-size", int, "N", "tokens per block; same memory unless --num-gpu-blocks"),
    Axis(
        "no-prefix-caching",
        bool,
        help="prefix caching off",
        field="enable_prefix_caching",
        on=False,
        words=lambda on: f"prefix caching {'on' if on else 'off'}",
    ),
    Axis("replicas", int, "N", read=lambda _, word: replicas_of(word), words=lambda n: f"{n} replica{'s' * (n != 1)}"),
    Axis("route", str, "POLICY", read=_route, words=str),
    Axis("event", str, "EVENT", read=_events, field="events", words=", ".join),
    *(Axis(name, *spec) for name, spec in DEPLOYMENT_FLAGS.items()),
)
"""All axes, in the order of scenario names and grid columns."""
AXIS_OF = {axis.name: axis for axis in AXES}
SCENARIO_FLAGS = ", ".join(axis.flag for axis in AXES)
