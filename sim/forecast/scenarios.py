"""Scenarios of a what-if: read from flags, and planned as a load on an engine."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from engines.routing.routes import parse_route
from sim.engine.fleetplan import CAPTURED, FleetPlan, add_fleet_flags, fleet_plan, replicas_of, upstream_names
from sim.latency.modelfile import Model, engine_with
from sim.vllm.config import EngineConfig
from sim.vllm.rules import FREE_RULES
from sim.vllm.settings import refuse_other_attention
from sim.workload.arrivalorder import linked_records
from sim.workload.arrivals import Arrivals, plan_arrivals
from tracefile import InputError, Meta, Record, load_trace, trace_digest

MOST_SCENARIOS = 200
_RULES = " or ".join(FREE_RULES)
BASELINE = "as captured"
_NUMBERS = {
    "num_gpu_blocks": "--num-gpu-blocks",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "block_size": "--block-size",
    "max_model_len": "--max-model-len",
}
SCENARIO_FLAGS = "--rate, --replicas, --route, --event, --cold-prompts, --no-prefix-caching, --free-rule, " + ", ".join(
    _NUMBERS.values()
)


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

    @property
    def differences(self) -> dict[str, int | str | bool]:
        """Settings that are not the capture's, by name."""
        fleet = {"replicas": self.replicas, "route": self.route, "events": ", ".join(self.events) or None}
        return {**self.settings, **{name: value for name, value in fleet.items() if value is not None}}

    @property
    def name(self) -> str:
        return self.name_beside(AS_CAPTURED) or BASELINE

    def name_beside(self, base: "Scenario") -> str:
        """Return the differences from ``base`` in words; empty: none."""
        words = ["cold prompts"] if self.cold_prompts > base.cold_prompts else []
        words += [f"rate ×{self.rate:g}"] if self.rate != base.rate else []
        for setting, value in self.settings.items():
            if base.settings.get(setting) == value:
                continue
            if setting == "enable_prefix_caching":
                words.append("prefix caching on" if value else "prefix caching off")
            else:
                words.append(f"{_NUMBERS.get(setting, setting).strip('-').replace('_', '-')} {value}")
        if self.replicas is not None and self.replicas != base.replicas:
            words.append(f"{self.replicas} replica{'' if self.replicas == 1 else 's'}")
        if self.route is not None and self.route != base.route:
            words.append(self.route)
        return ", ".join([*words, *(event for event in self.events if event not in base.events)])


AS_CAPTURED = Scenario({})


@dataclass(frozen=True, slots=True)
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

    @property
    def cold(self) -> bool:
        """True if its prompts were made to share nothing, whatever hashes its records keep."""
        return bool(self.meta.workload and self.meta.workload.cold_prompts)

    @property
    def has_turns(self) -> bool:
        return any(record.parent_id is not None or (record.turn or 1) > 1 for record in self.records)

    @property
    def upstreams(self) -> list[str]:
        """Servers of the capture."""
        return upstream_names(record.upstream for record in self.records)

    @property
    def tail_ms(self) -> float:
        last_ms = max((record.arrival_ms or 0.0 for record in self.records), default=0.0)
        return max(max((record.end_ms() or 0.0 for record in self.records), default=0.0) - last_ms, 0.0)


@dataclass(frozen=True, slots=True)
class Load:
    """A scenario's planned arrivals and engine."""

    scenario: Scenario
    arrivals: Arrivals
    engine: EngineConfig
    horizon_ms: float
    """Where the capture would have ended: as long after the last planned arrival as it did."""
    fleet: FleetPlan | None = None
    """None: one engine."""

    @property
    def most_blocks(self) -> int:
        """Different blocks that the load can ever fill, and a partial one of each request."""
        arrivals = self.arrivals
        private = int((arrivals.full_blocks - arrivals.known).sum())
        return len(np.unique(arrivals.hashes)) + private + int(arrivals.runs.sum())


def read_captured(path: Path, model: Model, *, paced: bool | None) -> Captured:
    """Read a trace that the model was not fitted on. ``paced`` None: as it was."""
    digest = trace_digest(path)
    model.refuse_fit_traces(digest, path)
    meta, records = load_trace(path)
    refuse_other_attention(meta, path)
    if not records:
        raise InputError(f"{path}: no records; expected at least one request")
    if paced is None:
        paced = _was_paced(meta, records)
    if paced:
        records = linked_records(meta, records, path)
    return Captured(path, digest, meta, records, captured_engine(model.engine, meta, records), paced)


def captured_engine(fitted: EngineConfig, meta: Meta, records: Sequence[Record]) -> EngineConfig:
    """Return the settings told, else ``fitted``; blocks and the longest request at least as the trace has them."""
    told = {name: getattr(meta.engine, name, None) for name in EngineConfig.__dataclass_fields__}
    engine = engine_with(fitted, told)
    if meta.block_size is not None and told["block_size"] is None and engine.block_size % meta.block_size:
        blocks = {"num_gpu_blocks": told["num_gpu_blocks"]} if told["num_gpu_blocks"] else {}
        engine = engine_with(engine, _same_memory(engine, {"block_size": meta.block_size, **blocks}))
    served = (record for record in records if record.status == "ok")
    longest = max((record.context_tokens() for record in served), default=0)
    if told["max_model_len"] is None and engine.enable_chunked_prefill and longest > (engine.max_model_len or longest):
        engine = engine_with(engine, {"max_model_len": longest})
    return engine


def plan(captured: Captured, scenario: Scenario) -> Load:
    """Plan the capture's load under ``scenario``. Raises InputError naming a setting that no engine could have."""
    engine = engine_with(captured.engine, _same_memory(captured.engine, scenario.settings))
    arrivals = plan_arrivals(
        captured.meta,
        list(captured.records),
        engine.block_size,
        path=str(captured.path),
        cold_prompts=scenario.cold_prompts or captured.cold,
        replay_sessions=captured.paced,
        needs_hashes=engine.enable_prefix_caching,
    )
    arrivals = at_rate(arrivals, scenario.rate)
    horizon_ms = float(arrivals.arrival_ms.max()) + captured.tail_ms
    return Load(scenario, arrivals, engine, horizon_ms, _fleet(captured, scenario))


def _fleet(captured: Captured, scenario: Scenario) -> FleetPlan | None:
    """Return the fleet of a scenario; of the capture's engines where it has several and no others are asked for."""
    upstreams, route, replicas = captured.upstreams, scenario.route, scenario.replicas
    if replicas is None and len(upstreams) > 1:
        if route in (None, CAPTURED) and not scenario.events:
            return FleetPlan(tuple(upstreams), CAPTURED)
        replicas = len(upstreams)
    told = None if replicas is None else str(replicas)
    return fleet_plan(told, route, scenario.events, lambda: upstreams)


def at_rate(arrivals: Arrivals, rate: float) -> Arrivals:
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
    size = settings.get("block_size")
    if size is None or size < 1 or "num_gpu_blocks" in settings:
        return dict(settings)
    return {**settings, "num_gpu_blocks": engine.usable_blocks * engine.block_size // size + 1}


def add_scenario_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of a scenario. Several values of a flag, separated by commas, make several scenarios."""
    different = parser.add_argument_group("what differs", "N,N,… are several scenarios; several flags: all together")
    different.add_argument("--cold-prompts", action="store_true", help="nothing is shared: every block is unique")
    different.add_argument("--rate", metavar="X,…", help="times the captured rate; think times stay")
    different.add_argument("--num-gpu-blocks", metavar="N,…", help="KV blocks, the null block included")
    different.add_argument("--max-num-seqs", metavar="N,…", help="requests running at once")
    different.add_argument("--max-num-batched-tokens", metavar="N,…", help="tokens per step")
    different.add_argument("--block-size", metavar="N,…", help="tokens per block; same memory unless --num-gpu-blocks")
    different.add_argument("--max-model-len", metavar="N,…", help="longest prompt plus output, in tokens")
    different.add_argument("--free-rule", metavar="RULE,…", help=f"where a freed block goes: {_RULES}")
    different.add_argument("--no-prefix-caching", action="store_true", help="nothing is hashed or hit")
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
        metavar="N",
        help="forecasts of each load, each with its own parameters and noise; more: finer intervals (default 32)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the members and their noise (default 0)")


def checked_members(members: int) -> int:
    """Return ``--members``. Raises InputError under two, which show no spread."""
    if members < 2:
        raise InputError(f"--members: {members}; expected 2 or more")
    return members


def scenarios_of(arguments: argparse.Namespace, base: Scenario = AS_CAPTURED) -> list[Scenario]:
    """Return every combination of the values given, over ``base``. Raises InputError naming the flag that is wrong."""
    choices: dict[str, list[Any]] = {}
    for setting, flag in _NUMBERS.items():
        text = getattr(arguments, flag.strip("-").replace("-", "_"))
        if text is not None:
            choices[setting] = [_whole(flag, word) for word in _words(flag, text)]
    if arguments.free_rule is not None:
        choices["free_rule"] = [_rule("--free-rule", word) for word in _words("--free-rule", arguments.free_rule)]
    if arguments.no_prefix_caching:
        choices["enable_prefix_caching"] = [False]
    replicas = (
        [base.replicas]
        if arguments.replicas is None
        else [replicas_of(word) for word in _words("--replicas", arguments.replicas)]
    )
    routes = [base.route] if arguments.route is None else _routes("--route", arguments.route)
    events = tuple(arguments.event) or base.events
    rates = [base.rate] if arguments.rate is None else [_rate("--rate", w) for w in _words("--rate", arguments.rate)]
    cold = arguments.cold_prompts or base.cold_prompts
    found = [
        Scenario({**base.settings, **dict(zip(choices, values, strict=True))}, rate, cold, count, route, events)
        for rate in rates
        for count in replicas
        for route in routes
        for values in product(*choices.values())
    ]
    if len(found) > MOST_SCENARIOS:
        raise InputError(f"{len(found)} scenarios, all combinations; expected at most {MOST_SCENARIOS}")
    return [one for one in found if one.name_beside(base)]


def parse_base(text: str) -> Scenario:
    """Read ``--base``: NAME=VALUE,… or a flag's name alone. Raises InputError naming the word that is wrong."""
    settings: dict[str, Any] = {}
    rate, cold = 1.0, False
    replicas: int | None = None
    route: str | None = None
    names = {flag.strip("-"): setting for setting, flag in _NUMBERS.items()}
    for word in _words("--base", text):
        name, _, value = word.partition("=")
        if name in names:
            settings[names[name]] = _whole(f"--base {name}", value)
        elif name == "free-rule":
            settings["free_rule"] = _rule("--base free-rule", value)
        elif name == "rate":
            rate = _rate("--base rate", value)
        elif name == "replicas":
            replicas = replicas_of(value)
        elif name == "route":
            (route,) = _routes("--base route", value)
        elif word == "no-prefix-caching":
            settings["enable_prefix_caching"] = False
        elif word == "cold-prompts":
            cold = True
        else:
            known = ", ".join(
                [*(f"{one}=N" for one in (*names, "replicas")), "rate=X", "free-rule=RULE", "route=POLICY"]
            )
            raise InputError(f"--base: {word!r}; expected some of {known}, no-prefix-caching, cold-prompts")
    return Scenario(settings, rate, cold, replicas, route)


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


def _rate(flag: str, word: str) -> float:
    try:
        rate = float(word)
    except ValueError:
        rate = 0.0
    if not 0.0 < rate < float("inf"):
        raise InputError(f"{flag}: {word!r}; expected a number above 0, such as 2 or 0.5,1,2")
    return rate


def _routes(flag: str, text: str) -> list[str]:
    words = _words(flag, text)
    for word in words:
        if word != CAPTURED:
            parse_route(word)
    return words


def _rule(flag: str, word: str) -> str:
    if word not in FREE_RULES:
        raise InputError(f"{flag}: {word!r}; expected {_RULES}")
    return word
