"""``sim serve``'s settings, checked once at the edge."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engines.routing import RULES
from sim.latency.modelfile import Model, Parameter, default_model, engine_with, load_model
from sim.latency.terms import TERMS
from sim.serving.engine.faults import Fault, parse_faults
from sim.vllm.flags import add_engine_flags, engine_overrides
from tracefile.commandline.durations import duration
from tracefile.records.errors import InputError

MAX_ENGINES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings from the command line."""

    host: str
    port: int
    """0: one that is free; the startup line tells which."""
    model: Model
    model_name: str
    tokenizer: Path | None
    speed: float | None
    """Virtual seconds per real one; None: no sleeping."""
    seed: int
    noise: bool
    median_answer_tokens: float
    tool_share: float
    engines: int
    route: str
    """A name of ``engines.routing.RULES``."""
    faults: tuple[Fault, ...]
    fault_control: bool
    drain_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="port 0: any free one (default %(default)s)")
    add("--latency-model", type=Path, help="a model.json; default: built-in parameters of a small engine")
    add("--model", help="what clients call it (default: the model.json's, or kvtape-sim)")
    add("--tokenizer", type=Path, metavar="DIR", help="a transformers tokenizer; default: a built-in vocabulary")
    add("--speed", default="1", metavar="X|max", help="virtual seconds per real one; max: no sleeping (default 1)")
    add("--seed", type=int, default=0, help="of answers and noise (default 0)")
    add("--noise", action=argparse.BooleanOptionalAction, default=True, help="draw the model's noise (default: yes)")
    add(
        "--answer-tokens", type=float, default=200.0, metavar="N", help="median length of answers that end on their own"
    )
    add(
        "--tool-share",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the answers that may call a tool and need not, those that do (default 0)",
    )
    add(
        "--engines",
        type=int,
        default=1,
        metavar="N",
        help="engines, each with its own cache (default 1)",
    )
    add("--route", choices=RULES, default="round-robin", help="which engine gets a request (default %(default)s)")
    add("--drain", type=duration, default="5s", metavar="TIME", help="time to end requests at SIGTERM (default 5s)")
    faults = parser.add_argument_group("what goes wrong on purpose")
    faults.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND[=VALUE][:RATE]",
        help="429, 500, latency, slow-first-byte, stall, garbage, truncate or reset, by share of requests (repeatable)",
    )
    faults.add_argument("--fault-control", action="store_true", help="obey X-Fault headers and PUT /faults too")
    add_engine_flags(parser)
    times = parser.add_argument_group("the model's parameters, one by one")
    for term in TERMS:
        times.add_argument(
            _flag(term.name), dest=term.name, type=float, metavar="X", help=f"{term.unit}: {term.counts}"
        )


def read_config(arguments: argparse.Namespace) -> ServeConfig:
    """The command line, checked. Raises InputError that names the flag."""
    host, port = _read_listen(arguments.listen)
    model = _read_model(arguments)
    if (arguments.model or "").endswith(".json"):
        raise InputError(
            f"--model {arguments.model}: is the served model's name; expected --latency-model {arguments.model}"
        )
    if not arguments.answer_tokens >= 1:
        raise InputError(f"--answer-tokens: {arguments.answer_tokens}; expected at least 1")
    if not 0.0 <= arguments.tool_share <= 1.0:
        raise InputError(f"--tool-share: {arguments.tool_share}; expected a share from 0 to 1")
    if not 1 <= arguments.engines <= MAX_ENGINES:
        raise InputError(f"--engines: {arguments.engines}; expected 1 to {MAX_ENGINES}")
    return ServeConfig(
        host=host,
        port=port,
        model=model,
        model_name=arguments.model or model.model_name or "kvtape-sim",
        tokenizer=arguments.tokenizer,
        speed=_read_speed(arguments.speed),
        seed=arguments.seed,
        noise=arguments.noise,
        median_answer_tokens=arguments.answer_tokens,
        tool_share=arguments.tool_share,
        engines=arguments.engines,
        route=arguments.route,
        faults=parse_faults(arguments.fault, "--fault"),
        fault_control=arguments.fault_control,
        drain_s=arguments.drain,
    )


def _read_model(arguments: argparse.Namespace) -> Model:
    model = default_model() if arguments.latency_model is None else load_model(arguments.latency_model)
    given = {term.name: getattr(arguments, term.name) for term in TERMS}
    parameters = dict(model.parameters)
    for term in TERMS:
        value = given[term.name]
        if value is not None:
            if not 0.0 <= value < float("inf"):
                raise InputError(f"{_flag(term.name)}: {value}; expected a finite number, 0 or more")
            parameters[term.name] = Parameter(value=value, unit=term.unit, note="from the command line")
    engine = engine_with(model.engine, engine_overrides(arguments))
    room = engine.usable_blocks * engine.block_size
    if arguments.max_model_len is not None and arguments.max_model_len > room:
        raise InputError(f"--max-model-len: {arguments.max_model_len}; expected at most the KV cache's {room} tokens")
    length = room if engine.max_model_len is None else min(engine.max_model_len, room)
    engine = engine_with(engine, {"max_model_len": length})
    return msgspec.structs.replace(model, parameters=parameters, engine=engine)


def _read_listen(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InputError(f"--listen {text}: expected HOST:PORT, such as 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def _read_speed(text: str) -> float | None:
    if text == "max":
        return None
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0.0 < speed < float("inf"):
        raise InputError(f"--speed {text}: expected a number above 0, or max")
    return speed


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
