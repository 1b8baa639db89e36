"""Scenarios of a what-if: read from flags, and planned as a load on an engine."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.routing.routes import parse_route
from sim.engine.deployment import DEPLOYMENT_FLAGS, Deployment, one_of, positive, refuse_alone, seconds, whole
from sim.engine.fleetplan import (
    CAPTURED,
    LONE_ROUTE,
    NO_ADAPTER_FLEET,
    FleetPlan,
    add_fleet_flags,
    fleet_plan,
    replicas_of,
    upstream_names,
    workers_plan,
)
from sim.engine.incidents import parse_event
from sim.latency.modelfile import Model, engine_with, load_model
from sim.vllm.config import KV_GROUPS_HELP, EngineConfig
from sim.vllm.eviction import EVICT_HELP, parse_evict
from sim.vllm.kvgroups import parse_groups, read_groups
from sim.vllm.rules import FREE_RULES
from sim.vllm.settings import other_attention, refuse_other_attention
from tracefile import InputError, Meta, Record, load_trace, trace_digest
from tracefile.commandline.parser import seed
from tracefile.records.latenames import LateModule, late_modules

if TYPE_CHECKING:
    import numpy as np

    from sim.engine import dispatch as dispatching
    from sim.engine import simstate
    from sim.workload import arrivalorder
    from sim.workload import arrivals as planning
    from sim.workload.arrivals import Arrivals
else:  # numpy, which the flags need not
    np = LateModule("numpy")
    dispatching, simstate = late_modules("sim.engine", "dispatch simstate")
    arrivalorder, planning = late_modules("sim.workload", "arrivalorder arrivals")


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
    mixed_with: str | None = None
    """model.json of every second engine."""
    adapter_load_s: float = 0.0
    max_loras: int = 1
    deployment: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``Deployment`` that are not its defaults."""

    @property
    def differences(self) -> dict[str, int | float | str | bool]:
        """Settings that are not the capture's, by name."""
        names = ("replicas", "route", "mixed_with", "adapter_load_s", "max_loras")
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
AS_DEPLOYED = Deployment()


@dataclass(frozen=True)
class Captured:
    """A trace, ready to be planned under scenarios."""

    path: Path
    digest: str
    meta: Meta
    records: Sequence[Record]
    engine: EngineConfig
    """The engine's settings: those that the trace tells or shows, else the model's."""
    paced: bool
    """Later turns wait for the outputs before them; if not, every request comes at its recorded offset."""
    planned: "dict[tuple[int, bool, bool], tuple[Arrivals, float]]" = field(default_factory=dict, compare=False)
    """Arrivals as captured and where the capture ends, by what they depend on: kept, as scenarios share them."""
    others: dict[str, tuple[EngineConfig, Model]] = field(default_factory=dict, compare=False)
    """Settings and model of other engines, by the model's path: kept, too."""

    @property
    def cold(self) -> bool:
        """True if its prompts were made to share nothing, whatever hashes its records keep."""
        return bool(self.meta.workload and self.meta.workload.cold_prompts)

    @property
    def has_turns(self) -> bool:
        return any(record.parent_id is not None or (record.turn or 1) > 1 for record in self.records)

    @cached_property
    def upstreams(self) -> list[str]:
        """Servers of the capture."""
        return upstream_names(record.upstream for record in self.records)

    @property
    def tail_ms(self) -> float:
        last_ms = max((record.arrival_ms or 0.0 for record in self.records), default=0.0)
        return max(max((record.end_ms() or 0.0 for record in self.records), default=0.0) - last_ms, 0.0)


@dataclass(frozen=True, slots=True)
class OtherEngine:
    """Settings and model of every second engine of a mixed fleet."""

    engine: EngineConfig
    model: Model


@dataclass(frozen=True, slots=True)
class Load:
    """A scenario's planned arrivals and engine."""

    scenario: Scenario
    arrivals: "Arrivals"
    engine: EngineConfig
    horizon_ms: float
    """Where the capture would have ended: as long after the last planned arrival as it did."""
    fleet: FleetPlan | None = None
    """None: one engine."""
    deployment: Deployment = AS_DEPLOYED
    other: OtherEngine | None = None
    """None: all engines are equal."""

    @property
    def most_blocks(self) -> int:
        """Different blocks that the load can ever fill, and a partial one of each request."""
        arrivals = self.arrivals
        private = int((arrivals.full_blocks - arrivals.known).sum())
        return len(np.unique(arrivals.hashes)) + private + int(arrivals.runs.sum())

    @property
    def serves(self) -> bool:
        """True if an engine can serve some request that waits for no other, or the capture tells its end."""
        roots = self.arrivals.take(np.flatnonzero(self.arrivals.parents == planning.NOBODY))
        engines = [self.engine] if self.other is None else [self.engine, self.other.engine]
        return not roots.runs.all() or any(simstate.servable(roots, engine).any() for engine in engines)


def read_captured(path: Path, model: Model, *, paced: bool | None, kv_groups: str | None = None) -> Captured:
    """Read a trace that the model was not fitted on. ``paced`` None: as it was.

    ``kv_groups``: of the capture's engine, where its header tells of several and the model of one.
    """
    digest = trace_digest(path)
    model.refuse_fit_traces(digest, path)
    meta, records = load_trace(path)
    model.refuse_fit_requests(records, path)
    fitted = model.engine
    if fitted.kv_groups is None and kv_groups is not None and other_attention(meta) is not None:
        fitted = engine_with(fitted, {"kv_groups": kv_groups, "block_size": parse_groups(kv_groups).match_unit})
    if fitted.kv_groups is None:
        refuse_other_attention(meta, path, "sim fit --kv-groups, sim what-if --base kv-groups=GROUPS")
    if not records:
        raise InputError(f"{path}: no records; expected at least one request")
    if paced is None:
        paced = _was_paced(meta, records)
    if paced:
        records = arrivalorder.linked_records(meta, records, path)
    return Captured(path, digest, meta, records, captured_engine(fitted, meta, records), paced)


def captured_engine(fitted: EngineConfig, meta: Meta, records: Sequence[Record]) -> EngineConfig:
    """Return the settings told, else ``fitted``; blocks and the longest request at least as the trace has them."""
    told = {name: getattr(meta.engine, name, None) for name in EngineConfig.__dataclass_fields__}
    told["block_size"] = told["block_size"] if fitted.kv_groups is None else fitted.block_size
    engine = engine_with(fitted, told)
    if meta.block_size is not None and told["block_size"] is None and engine.block_size % meta.block_size:
        blocks = {"num_gpu_blocks": told["num_gpu_blocks"]} if told["num_gpu_blocks"] else {}
        engine = engine_with(engine, _same_memory(engine, {"block_size": meta.block_size, **blocks}))
    served = (record for record in records if record.status == "ok")
    longest = max((record.context_tokens() for record in served), default=0)
    if told["max_model_len"] is None and engine.enable_chunked_prefill and longest > (engine.max_model_len or longest):
        engine = engine_with(engine, {"max_model_len": longest})
    return engine


def plan_as(name: str, captured: Captured, scenario: Scenario) -> Load:
    """Plan as ``plan`` does; its InputError begins with ``name``."""
    try:
        return plan(captured, scenario)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def plan(captured: Captured, scenario: Scenario) -> Load:
    """Plan the capture's load under ``scenario``. Raises InputError naming a setting that no engine could have."""
    engine, fleet, deployment = engines_asked(captured, scenario)
    cold = scenario.cold_prompts or captured.cold
    key = (engine.block_size, cold, engine.enable_prefix_caching)
    if key not in captured.planned:
        arrivals = planning.plan_arrivals(
            captured.meta,
            list(captured.records),
            engine.block_size,
            path=str(captured.path),
            cold_prompts=cold,
            replay_sessions=captured.paced,
            needs_hashes=engine.enable_prefix_caching,
        )
        captured.planned[key] = arrivals, captured.tail_ms
    arrivals, tail_ms = captured.planned[key]
    arrivals = at_rate(arrivals, scenario.rate)
    horizon_ms = float(arrivals.arrival_ms.max()) + tail_ms
    deployment.require_room(arrivals, engine.block_size)
    if engine.kv_groups is not None and fleet is not None:
        raise InputError(f"--kv-groups: {engine.kv_groups}; expected one group in a fleet of engines")
    other = None if scenario.mixed_with is None else _other_engine(captured, scenario, engine, fleet)
    return Load(scenario, arrivals, engine, horizon_ms, fleet, deployment, other)


def _other_engine(captured: Captured, scenario: Scenario, engine: EngineConfig, fleet: FleetPlan | None) -> OtherEngine:
    path = str(scenario.mixed_with)
    if fleet is None or len(fleet.names) == 1:
        raise InputError(f"--mixed-with: {path} for one engine; expected --replicas 2 or more")
    if path not in captured.others:
        model = load_model(Path(path))
        model.refuse_fit_traces(captured.digest, captured.path)
        model.refuse_fit_requests(captured.records, captured.path)
        captured.others[path] = captured_engine(model.engine, captured.meta, captured.records), model
    own, model = captured.others[path]
    if own.kv_groups is not None:
        raise InputError(f"--mixed-with: {path}: KV groups {own.kv_groups}; expected a model with one group in a fleet")
    own = engine_with(own, _same_memory(own, scenario.settings))
    own = engine_with(own, Deployment(**scenario.deployment).engine(own, scenario.settings))
    if own.block_size != engine.block_size:
        raise InputError(
            f"--mixed-with: {path}: blocks of {own.block_size} tokens beside {engine.block_size}; expected --block-size"
        )
    return OtherEngine(own, model)


def engines_asked(captured: Captured, scenario: Scenario) -> tuple[EngineConfig, FleetPlan | None, Deployment]:
    """Return the settings of a scenario's engines, their fleet (the capture's unless others are asked), and layout."""
    deployment = Deployment(**scenario.deployment)
    engine = engine_with(captured.engine, _same_memory(captured.engine, scenario.settings))
    engine = engine_with(engine, deployment.engine(engine, scenario.settings))
    upstreams, route, replicas = captured.upstreams, scenario.route, scenario.replicas
    if deployment.workers:
        return engine, workers_plan(deployment, route, replicas, scenario.events), deployment
    if replicas is None and len(upstreams) > 1:
        if route in (None, CAPTURED) and not scenario.events:
            return engine, FleetPlan(tuple(upstreams), CAPTURED), deployment
        replicas = len(upstreams)
    if replicas is None and route not in (None, CAPTURED) and not (scenario.events or scenario.adapter_load_s):
        raise InputError(f"--route: {LONE_ROUTE}")
    told = None if replicas is None else str(replicas)
    found = fleet_plan(told, route, scenario.events, lambda: upstreams)
    if scenario.adapter_load_s and (found is None or found.route == CAPTURED):
        raise InputError(NO_ADAPTER_FLEET)
    if found is not None:
        found = replace(found, adapters=dispatching.AdapterLoad(scenario.max_loras, 1e3 * scenario.adapter_load_s))
    return engine, found, deployment


def at_rate(arrivals: "Arrivals", rate: float) -> "Arrivals":
    """Divide offsets from the first arrival by ``rate``; think times stay."""
    if rate == 1.0:
        return arrivals
    first_ms = arrivals.arrival_ms.min()
    return replace(arrivals, arrival_ms=first_ms + (arrivals.arrival_ms - first_ms) / rate)


def _was_paced(meta: Meta, records: Sequence[Record]) -> bool:
    """True where there are sessions, unless a replay sent every request at its recorded time."""
    at_recorded_times = meta.workload is not None and meta.workload.pattern == "replay"
    return not at_recorded_times and any(record.parent_id is not None for record in records)


def _same_memory(engine: EngineConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    found, groups = dict(settings), settings.get("kv_groups", engine.kv_groups)
    if settings.get("kv_groups") is not None:
        found["block_size"] = parse_groups(groups).match_unit
    if (found.get("block_size") or 0) < 1 or "num_gpu_blocks" in found:
        return found
    (before, groups_before), (after, groups_after) = (
        _block_of(engine.kv_groups, engine.block_size),
        _block_of(groups, found["block_size"]),
    )
    return {**found, "num_gpu_blocks": engine.usable_blocks * before * groups_after // (after * groups_before) + 1}


def _block_of(groups: str | None, block_size: int) -> tuple[int, int]:
    """Tokens that a block holds, those of the largest, and groups among whose layers the model's are divided."""
    if groups is None:
        return block_size, 1
    layout = parse_groups(groups)
    return max(group.block_size for group in layout.groups), len(layout.groups)


def add_scenario_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of a scenario. Several values of a flag, separated by commas, make several scenarios."""
    different = parser.add_argument_group("what differs", "N,N,… are several scenarios; several flags: all together")
    for axis in AXES:
        if axis.kind is bool:
            different.add_argument(axis.flag, action="store_true", help=axis.help)
        elif axis.help:
            told = "" if "default" in axis.help else " (default: the capture's)"
            different.add_argument(axis.flag, metavar=f"{axis.metavar},…", help=f"{axis.help}{told}")
    add_fleet_flags(parser, several=True)


def add_forecast_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replay-sessions",
        action=argparse.BooleanOptionalAction,
        help="a turn comes its think time after its parent's predicted end, or at its recorded offset; default: the "
        "former where the trace has sessions",
    )
    parser.add_argument(
        "--members",
        type=int,
        default=32,
        help="forecasts of each load, each with its own parameters and noise; more: finer intervals",
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of the members and their noise")


def checked_confidence(confidence: float) -> float:
    """Return ``--confidence``. Raises InputError for what is no share of the members."""
    if not 0.0 < confidence <= 1.0:
        raise InputError(f"--confidence: {confidence:g}; expected more than 0 and at most 1")
    return confidence


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
    return [one for one in combinations(choices, base) if one.name_beside(base)]


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
            known = [name if one.kind is bool else f"{name}={one.metavar}" for name, one in AXIS_OF.items()]
            raise InputError(f"--base: {word!r}; expected some of {', '.join(known)}")
        base = axis.put(base, axis.on if axis.kind is bool else axis.read(f"--base {name}", value))
    return base


def _words(flag: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words) or len(set(words)) < len(words):
        raise InputError(f"{flag}: {text!r}; expected different values separated by commas")
    return words


def _whole(flag: str, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise InputError(f"{flag}: {word!r}; expected a whole number, or several separated by commas") from None


def _route(flag: str, word: str) -> str:
    if word != CAPTURED:
        parse_route(word)
    return word


def _evict(flag: str, word: str) -> str:
    parse_evict(word, flag)
    return word


def _events(flag: str, word: str) -> tuple[str, ...]:
    """Return an event; an empty word is none, beside which a grid has others."""
    if not word:
        return ()
    parse_event(word)
    return (word,)


@dataclass(frozen=True, slots=True)
class Axis:
    """A quantity in which scenarios differ: a flag, a word of ``--base`` and a key of a grid, all of one name."""

    name: str
    kind: type
    """Of a value in a grid. A ``bool`` is a flag without a value."""
    metavar: str = ""
    help: str = ""
    """Empty: its flag is one of ``add_fleet_flags``."""
    read: Callable[[str, str], Any] = _whole
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
    Axis("max-model-len", int, "N", "longest prompt plus output, in tokens"),
    Axis("free-rule", str, "RULE", f"where a freed block goes: {' or '.join(FREE_RULES)}", one_of(*FREE_RULES)),
    Axis("evict", str, "POLICY", EVICT_HELP, _evict),
    Axis("kv-groups", str, "GROUPS", KV_GROUPS_HELP, lambda _, word: read_groups(word).name),
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
    Axis(
        "mixed-with",
        str,
        "MODEL",
        "model.json of every second engine, of other hardware (default: none)",
        lambda _, word: word or None,
        say=lambda path: f"mixed with {path}",
    ),
    Axis(
        "adapter-load",
        str,
        "TIME",
        "delay of a request whose LoRA adapter is not resident, such as 200ms (default 0)",
        seconds,
        field="adapter_load_s",
        say=lambda load_s: f"adapter load {load_s:g} s",
    ),
    Axis("max-loras", int, "N", "adapters resident on an engine at once (default 1)", whole(1)),
    *(Axis(name, *one) for name, one in DEPLOYMENT_FLAGS.items()),
)
"""Everything in which scenarios may differ, in the order of their names and of a grid's columns."""
AXIS_OF = {axis.name: axis for axis in AXES}
SCENARIO_FLAGS = ", ".join(axis.flag for axis in AXES)
