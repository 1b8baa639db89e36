"""Scenarios of a what-if: differences from a capture, read from flags."""

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
    """Differences from the capture: engine settings, the rate as a multiple, prompts that share no block."""

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
        """Settings that are not the capture's, by name."""
        names = ("replicas", "route")
        fleet = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(AS_CAPTURED, name)}
        events = {"events": ", ".join(self.events)} if self.events else {}
        return {**self.settings, **self.deployment, **fleet, **events}

    @property
    def name(self) -> str:
        return self.name_beside(AS_CAPTURED) or BASELINE

    def name_beside(self, base: "Scenario") -> str:
        """Return the differences from ``base`` in words; empty: none."""
        pairs = [(axis, axis.value_in(self), axis.value_in(base)) for axis in AXES]
        differ = [(axis, value) for axis, value, before in pairs if value != before]
        return ", ".join((axis.said(value) if value is not None else "") or f"no {axis.name}" for axis, value in differ)


AS_CAPTURED = Scenario({})


def add_scenario_flags(parser: Parser) -> None:
    """Declare the flags of a scenario. Several values of a flag, separated by commas, make several scenarios."""
    different = parser.add_argument_group("what differs", "N,N,… are several scenarios; several flags: all together")
    for axis in AXES:
        if axis.kind is bool:
            different.add_argument(axis.flag, action="store_true", help=axis.help)
        elif axis.help:
            default = "" if "default" in axis.help else " (default: the capture's)"
            add = parser.add_setting if axis.name in RARE else different.add_argument
            add(axis.flag, metavar=f"{axis.metavar},…", help=f"{axis.help}{default}")
    add_fleet_flags(parser, several=True)


def add_capture_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of a command that forecasts a capture."""
    parser.add_argument("trace", type=Path, help="the capture; never one that the model was fitted on")
    parser.add_argument("--latency-model", type=Path, required=True, help="model.json from sim calibrate")
    add_page_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    parser.add_argument(
        "--members",
        type=int,
        default=32,
        help="forecasts of each load, each with its own parameters and noise; more: finer intervals",
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of the members and their noise")


def checked_members(members: int) -> int:
    """Return ``--members``. Raises InputError under two, which show no spread."""
    if members < 2:
        raise InputError(f"--members: {members}; expected 2 or more")
    return members


def scenarios_of(arguments: argparse.Namespace, base: Scenario = AS_CAPTURED, searched: str = "") -> list[Scenario]:
    """Return every combination of the values given, over ``base``; ``searched``: an axis that gets values later.

    Raises InputError naming the flag that is wrong.
    """
    choices = {axis: values for axis in AXES if (values := _asked(axis, arguments))}
    refuse_alone({searched, *(axis.name for axis in choices), *axes_in(base)})
    count = prod(map(len, choices.values()))
    if count > MOST_SCENARIOS:
        raise InputError(f"{count} scenarios, all combinations; expected at most {MOST_SCENARIOS}")
    return [scenario for scenario in combinations(choices, base) if scenario.name_beside(base)]


def axes_in(scenario: Scenario) -> list[str]:
    """Names of the axes on which a scenario differs from the capture."""
    return [axis.name for axis in AXES if axis.value_in(scenario) != axis.value_in(AS_CAPTURED)]


def _asked(axis: "Axis", arguments: argparse.Namespace) -> list[Any]:
    """Return the values that a flag gives; none: it is not given. Events come all together."""
    given = getattr(arguments, axis.name.replace("-", "_"))
    if not given or axis.kind is bool:
        return [axis.on] if given else []
    if isinstance(given, list):
        return [tuple(given)]
    return [axis.read(axis.flag, word) for word in _words(axis.flag, given)]


def combinations(choices: Mapping["Axis", Sequence[Any]], base: Scenario) -> Iterator[Scenario]:
    """Yield every combination of values over ``base``; those of the last axis change first."""
    for values in product(*choices.values()):
        made = base
        for axis, value in zip(choices, values, strict=True):
            made = axis.put(made, value)
        yield made


def parse_base(text: str) -> Scenario:
    """Read ``--base``: NAME=VALUE,… or a flag's name alone. Raises InputError naming the word that is wrong."""
    base = AS_CAPTURED
    for word in _words("--base", text):
        name, _, value = word.partition("=")
        axis = AXIS_OF.get(name)
        if axis is None or (axis.kind is bool and word != name):
            known = [key if other.kind is bool else f"{key}={other.metavar}" for key, other in AXIS_OF.items()]
            raise InputError(f"--base: {word!r}; expected some of {', '.join(known)}")
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
    """Return an event; an empty word is none, beside which a grid has others."""
    if not word:
        return ()
    parse_event(word)
    return (word,)


WHOLE = integer(0)


@dataclass(frozen=True, slots=True)
class Axis:
    """A quantity in which scenarios differ: a flag, a word of ``--base`` and a key of a grid, all of one name."""

    name: str
    kind: type
    """Of a value in a grid. A ``bool`` is a flag without a value."""
    metavar: str = ""
    help: str = ""
    """Empty: its flag is one of ``add_fleet_flags``."""
    read: Callable[[str, str], Any] = WHOLE
    """Value of a word after the flag's name. Raises InputError."""
    field: str = ""
    """Field of the engine's settings, of ``Deployment`` or of ``Scenario``; empty: as named."""
    on: bool = True
    """Value of a ``bool`` that is given."""
    say: Callable[[Any], str] | None = None
    """Value in words; None: after the name."""

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def own_field(self) -> str:
        return self.field or self.name.replace("-", "_")

    def said(self, value: Any) -> str:
        return f"{self.name} {value}" if self.say is None else self.say(value)

    def value_in(self, scenario: Scenario) -> Any:
        """Return the scenario's value; None: as captured."""
        own = self.own_field
        if own in Scenario.__dataclass_fields__:
            return getattr(scenario, own)
        return (scenario.deployment if own in Deployment.__dataclass_fields__ else scenario.settings).get(own)

    def put(self, scenario: Scenario, value: Any) -> Scenario:
        """Return the scenario with this value."""
        own = self.own_field
        if own in Scenario.__dataclass_fields__:
            return replace(scenario, **{own: value})
        if own in Deployment.__dataclass_fields__:
            return replace(scenario, deployment={**scenario.deployment, own: value})
        return replace(scenario, settings={**scenario.settings, own: value})


AXES = (
    Axis("cold-prompts", bool, help="nothing is shared: every block is unique", say=lambda on: "cold prompts" * on),
    Axis(
        "rate",
        float,
        "X",
        "times the captured rate; think times stay",
        positive,
        say=lambda rate: f"rate ×{rate:g}",
    ),
    Axis("num-gpu-blocks", int, "N", "KV blocks, the null block included"),
    Axis("max-num-seqs", int, "N", "requests running at once"),
    Axis("max-num-batched-tokens", int, "N", "tokens per step"),
    Axis("block-size", int, "N", "tokens per block; same memory unless --num-gpu-blocks"),
    Axis(
        "no-prefix-caching",
        bool,
        help="nothing is hashed or hit",
        field="enable_prefix_caching",
        on=False,
        say=lambda on: f"prefix caching {'on' if on else 'off'}",
    ),
    Axis("replicas", int, "N", read=lambda _, word: replicas_of(word), say=lambda n: f"{n} replica{'s' * (n != 1)}"),
    Axis("route", str, "POLICY", read=_route, say=str),
    Axis("event", str, "EVENT", read=_events, field="events", say=", ".join),
    *(Axis(name, *one) for name, one in DEPLOYMENT_FLAGS.items()),
)
"""Everything in which scenarios may differ, in the order of their names and of a grid's columns."""
AXIS_OF = {axis.name: axis for axis in AXES}
SCENARIO_FLAGS = ", ".join(axis.flag for axis in AXES)
