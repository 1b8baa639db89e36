"""``sim serve``: an OpenAI-compatible engine without a model, which keeps the time that a model of one predicts."""

import argparse
import asyncio
import contextlib
import gc
import os
import secrets
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engines.routing import ROUTE_HELP, Route, parse_route
from sim.latency.modelfile import Model, Parameter, default_model, engine_with, load_model
from sim.latency.terms import TERMS
from sim.serving.apis.completions import Chats, Completions
from sim.serving.apis.messages import Messages
from sim.serving.apis.responses import Responses
from sim.serving.controlapp import AsgiPages, make_app
from sim.serving.endpoint import Endpoint
from sim.serving.engine.faults import Fault, Faults, parse_faults
from sim.serving.engine.service import Adapters, Fleet, Service
from sim.serving.exchange import Exchange, Handler, HttpRequest
from sim.serving.requests.vocabulary import PieceVocabulary, Spelling, TokenizerVocabulary, Vocabulary
from sim.vllm.config import add_engine_flags, engine_overrides
from tracefile import HashKey
from tracefile.commandline.configfile import flag_of
from tracefile.commandline.durations import duration
from tracefile.commandline.parser import VERSION, same_named
from tracefile.records.errors import InputError
from wire.errors import WireError
from wire.loop import run as run_loop
from wire.server import BACKLOG, Server
from wire.url import parse_listen

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
    median_output_tokens: float
    tool_share: float
    engines: int
    route: Route
    adapters: Adapters
    faults: tuple[Fault, ...]
    fault_control: bool
    drain_s: float


EPILOG = "examples:\n  sim serve --latency-model model.json --listen :8000\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="no host: all addresses; port 0: any free one")
    add(
        "--latency-model",
        type=Path,
        metavar="MODEL",
        help="a model.json (default: built-in parameters of a small engine)",
    )
    add("--model", metavar="NAME", help="what clients call it (default: the model.json's, or kvtape-sim)")
    add("--tokenizer", type=Path, metavar="DIR", help="a transformers tokenizer (default: a built-in vocabulary)")
    add("--speed", default="1", metavar="X|max", help="virtual seconds per real one, such as 10; max: no sleeping")
    add("--seed", type=int, default=0, help="seed of outputs and noise")
    add("--noise", action=argparse.BooleanOptionalAction, default=True, help="draw the model's noise (default: yes)")
    add(
        "--output-tokens", type=float, default=200.0, metavar="N", help="median tokens of outputs that end on their own"
    )
    add(
        "--tool-share",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of outputs that call a tool, of those that may and need not",
    )
    add("--engines", type=int, default=1, help="engines, each with its own cache")
    add("--route", default="round-robin", metavar="POLICY", help=ROUTE_HELP)
    add("--adapter", action="append", default=[], metavar="NAME", help="a LoRA adapter to serve (repeatable)")
    add("--adapter-load", type=duration, default="0", help="delay of a request that loads one, such as 200ms")
    add("--max-loras", type=int, default=1, help="adapters resident on an engine at once")
    add("--drain", type=duration, default="5s", help="time to end requests at SIGTERM")
    faults = parser.add_argument_group("what goes wrong on purpose")
    faults.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND[=VALUE][:RATE]",
        help="429, 500, latency, slow-first-byte, stall, garbage, truncate or reset, by share of requests, as 500:0.01 "
        "or latency=2s:0.1 (repeatable)",
    )
    faults.add_argument("--fault-control", action="store_true", help="obey X-Fault headers and PUT /faults too")
    add_engine_flags(parser)
    times = parser.add_argument_group("the model's parameters, one by one")
    for term in TERMS:
        times.add_argument(
            flag_of(term.name), dest=term.name, type=float, help=f"{term.unit}: {term.counts} (default: the model's)"
        )


def read_config(arguments: argparse.Namespace) -> ServeConfig:
    """The command line, checked. Raises InputError that names the flag."""
    try:
        host, port = parse_listen(arguments.listen)
    except WireError as error:
        raise InputError(f"--listen: {error}") from None
    model = _read_model(arguments)
    if (arguments.model or "").endswith(".json"):
        raise InputError(
            f"--model {arguments.model}: is the served model's name; expected --latency-model {arguments.model}"
        )
    if not arguments.output_tokens >= 1:
        raise InputError(f"--output-tokens: {arguments.output_tokens}; expected at least 1")
    if not 0.0 <= arguments.tool_share <= 1.0:
        raise InputError(f"--tool-share: {arguments.tool_share}; expected a share from 0 to 1")
    if not 1 <= arguments.engines <= MAX_ENGINES:
        raise InputError(f"--engines: {arguments.engines}; expected 1 to {MAX_ENGINES}")
    if arguments.max_loras < 1:
        raise InputError(f"--max-loras: {arguments.max_loras}; expected 1 or more")
    made = {
        "host": host,
        "port": port,
        "model": model,
        "model_name": arguments.model or model.model_name or "kvtape-sim",
        "speed": _read_speed(arguments.speed),
        "median_output_tokens": arguments.output_tokens,
        "route": parse_route(arguments.route),
        "adapters": Adapters(
            names=tuple(arguments.adapter), load_ms=1e3 * arguments.adapter_load, slots=arguments.max_loras
        ),
        "faults": parse_faults(arguments.fault, "--fault"),
        "drain_s": arguments.drain,
    }
    return ServeConfig(**(same_named(ServeConfig, arguments) | made))


def _read_model(arguments: argparse.Namespace) -> Model:
    model = default_model() if arguments.latency_model is None else load_model(arguments.latency_model)
    parameters = dict(model.parameters)
    for term in TERMS:
        value = getattr(arguments, term.name)
        if value is not None:
            if not 0.0 <= value < float("inf"):
                raise InputError(f"{flag_of(term.name)}: {value}; expected a finite number, 0 or more")
            parameters[term.name] = Parameter(value=value, unit=term.unit, note="from the command line")
    engine = engine_with(model.engine, engine_overrides(arguments))
    room = engine.usable_blocks * engine.block_size
    if arguments.max_model_len is not None and arguments.max_model_len > room:
        raise InputError(f"--max-model-len: {arguments.max_model_len}; expected at most the KV cache's {room} tokens")
    length = room if engine.max_model_len is None else min(engine.max_model_len, room)
    engine = engine_with(engine, {"max_model_len": length})
    return msgspec.structs.replace(model, parameters=parameters, engine=engine)


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


__all__ = ["add_arguments", "run"]

GARBAGE_EVERY = 50_000
"""New objects between two looks for cycles: a request leaves none, so looking more often only delays tokens."""


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; 0 then."""
    config = read_config(arguments)
    vocabulary: Vocabulary = PieceVocabulary() if config.tokenizer is None else TokenizerVocabulary(config.tokenizer)
    listener = _listen(config.host, config.port)
    # What is loaded by now stays: collecting it again and again would stop the clock for tens of milliseconds.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_EVERY)
    with listener:
        run_loop(_serve(config, vocabulary, listener))
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        # A busy address has a number that says so in three words; an unknown host has only words.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        raise InputError(f"--listen {host}:{port}: {reason}; expected a free address of this machine") from None


async def _serve(config: ServeConfig, vocabulary: Vocabulary, listener: socket.socket) -> None:
    """Engines and server side by side until a signal: SIGTERM lets outputs end, Ctrl-C or a second one cuts them."""
    service = _make_service(config, vocabulary)
    dispatch = _dispatcher(service)
    server = Server(lambda head, connection: Exchange(head, connection, dispatch), error_type="BadRequestError")
    stepping = asyncio.create_task(service.fleet.run())
    stopped, cut = asyncio.Event(), asyncio.Event()

    def stop(number: int) -> None:
        if stopped.is_set() or number == signal.SIGINT:
            cut.set()
        stopped.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    await server.listen_on(listener)
    print(_ready_line(config, listener), flush=True)
    # The engine ends first only by a fault, which must not leave a server that never outputs.
    await _first(stopped.wait(), stepping)
    if not stepping.done():
        await _first(server.drain(config.drain_s), cut.wait(), stepping)
    service.fleet.abort_all()
    await server.drain(0)
    if stepping.done():
        await stepping
    stepping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stepping


async def _first(*waits: Any) -> None:
    """Until one of these is done; the others are cancelled, but for tasks that were there before."""
    tasks = [wait if isinstance(wait, asyncio.Task) else asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, wait in zip(tasks, waits, strict=True):
        if task is not wait:
            task.cancel()


def _dispatcher(service: Service) -> Handler:
    messages = Messages()
    pages = AsgiPages(make_app(service, messages.count_tokens))
    endpoints = {
        "/v1/completions": Endpoint(service, Completions()),
        "/v1/chat/completions": Endpoint(service, Chats()),
        "/v1/messages": Endpoint(service, messages),
        "/v1/responses": Endpoint(service, Responses()),
    }

    def dispatch(request: HttpRequest, exchange: Exchange) -> None:
        endpoints.get(request.path, pages)(request, exchange)

    return dispatch


def _make_service(config: ServeConfig, vocabulary: Vocabulary) -> Service:
    noise_seed = config.seed if config.noise else None
    return Service(
        fleet=Fleet(
            *(config.model, config.engines, config.route),
            speed=config.speed,
            noise_seed=noise_seed,
            adapters=config.adapters,
        ),
        vocabulary=vocabulary,
        spelling=Spelling(vocabulary),
        model_name=config.model_name,
        max_model_len=config.model.engine.max_model_len or 0,
        version=VERSION,
        seed=config.seed,
        median_output_tokens=config.median_output_tokens,
        tool_share=config.tool_share,
        faults=Faults(config.faults, config.seed, config.fault_control),
        hash_key=HashKey(secrets.token_bytes(32)),
    )


def _ready_line(config: ServeConfig, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    speed = "as fast as it goes" if config.speed is None else f"speed {config.speed:g}"
    engines = "" if config.engines == 1 else f"{config.engines} engines, {config.route.text}, "
    return f"sim serve: {config.model_name} at http://{shown}:{port} ({engines}{speed})"
