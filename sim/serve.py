"""``sim serve``: an OpenAI-compatible engine without a model, which keeps the time that a model of one predicts."""

import argparse
import asyncio
import contextlib
import gc
import importlib.metadata
import logging
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from sim.api import make_app
from sim.features import TERMS
from sim.model import Model, Parameter, default_model, engine_with, load_model
from sim.realtime import RealTimeEngine
from sim.service import Service
from sim.tokenizer import TokenizerVocabulary
from sim.vocabulary import PieceVocabulary, Vocabulary
from tracefile import HashKey
from tracefile.errors import InputError

BACKLOG = 4096
KEEP_ALIVE_S = 75
SHUTDOWN_S = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What the command line says."""

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``sim serve``."""
    add = parser.add_argument
    add("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="port 0: any free one (default %(default)s)")
    add("--model", type=Path, help="a model.json; default: built-in parameters of a small engine")
    add("--served-model-name", help="what clients call it (default: the model.json's, or kvtape-sim)")
    add("--tokenizer", type=Path, metavar="DIR", help="a transformers tokenizer; default: a built-in vocabulary")
    add("--speed", default="1", metavar="X|max", help="virtual seconds per real one; max: no sleeping (default 1)")
    add("--seed", type=int, default=0, help="of answers and noise (default 0)")
    add("--noise", action=argparse.BooleanOptionalAction, default=True, help="draw the model's noise (default: yes)")
    add(
        "--answer-tokens", type=float, default=200.0, metavar="N", help="median length of answers that end on their own"
    )
    engine = parser.add_argument_group("the engine's settings (default: the model's)")
    engine.add_argument("--kv-blocks", dest="num_gpu_blocks", type=int, help="KV-cache blocks, the null block included")
    engine.add_argument("--block-size", dest="block_size", type=int, help="tokens in a block")
    engine.add_argument("--max-num-seqs", dest="max_num_seqs", type=int, help="requests running at once")
    engine.add_argument("--max-num-batched-tokens", dest="max_num_batched_tokens", type=int, help="tokens in a step")
    engine.add_argument("--max-model-len", dest="max_model_len", type=int, help="longest prompt plus answer, tokens")
    caching, scheduling = argparse.BooleanOptionalAction, argparse.BooleanOptionalAction
    engine.add_argument("--prefix-caching", dest="enable_prefix_caching", action=caching, help="share prefixes")
    engine.add_argument("--async-scheduling", dest="async_scheduling", action=scheduling, help="compose a step ahead")
    times = parser.add_argument_group("the model's parameters, one by one")
    for term in TERMS:
        times.add_argument(
            _flag(term.name), dest=term.name, type=float, metavar="X", help=f"{term.unit}: {term.counts}"
        )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; 0 then."""
    config = read_config(arguments)
    vocabulary: Vocabulary = PieceVocabulary() if config.tokenizer is None else TokenizerVocabulary(config.tokenizer)
    listener = _listen(config.host, config.port)
    # What is loaded by now stays: collecting it again and again would stop the clock for tens of milliseconds.
    gc.collect()
    gc.freeze()
    runner = asyncio.Runner(loop_factory=_loop_factory())
    with listener, runner:
        runner.run(_serve(config, vocabulary, listener))
    return 0


def read_config(arguments: argparse.Namespace) -> ServeConfig:
    """The command line, checked. Raises InputError that names the flag."""
    host, port = _read_listen(arguments.listen)
    model = _read_model(arguments)
    if not arguments.answer_tokens >= 1:
        raise InputError(f"--answer-tokens: {arguments.answer_tokens}; expected at least 1")
    return ServeConfig(
        host=host,
        port=port,
        model=model,
        model_name=arguments.served_model_name or model.model_name or "kvtape-sim",
        tokenizer=arguments.tokenizer,
        speed=_read_speed(arguments.speed),
        seed=arguments.seed,
        noise=arguments.noise,
        median_answer_tokens=arguments.answer_tokens,
    )


def _read_model(arguments: argparse.Namespace) -> Model:
    model = default_model() if arguments.model is None else load_model(arguments.model)
    given = {term.name: getattr(arguments, term.name) for term in TERMS}
    parameters = dict(model.parameters)
    for term in TERMS:
        value = given[term.name]
        if value is not None:
            if not 0.0 <= value < float("inf"):
                raise InputError(f"{_flag(term.name)}: {value}; expected a finite number, 0 or more")
            parameters[term.name] = Parameter(value=value, unit=term.unit, note="from the command line")
    names = ("num_gpu_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    overrides = {name: getattr(arguments, name) for name in (*names, "enable_prefix_caching", "async_scheduling")}
    engine = engine_with(model.engine, overrides)
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


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        # A busy address has a number that says so in three words; an unknown host has only words.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        raise InputError(f"--listen {host}:{port}: {reason}") from None


def _loop_factory() -> Any:
    try:
        import uvloop  # noqa: PLC0415  # not there on every platform
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Server(uvicorn.Server):
    """uvicorn's server, less its signal handling, which ends the process by the signal instead of cleanly."""

    def __init__(self, config: uvicorn.Config, ready_line: str) -> None:
        super().__init__(config)
        self._ready_line = ready_line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        print(self._ready_line, flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(config: ServeConfig, vocabulary: Vocabulary, listener: socket.socket) -> None:
    """Engine and HTTP server side by side until a signal; then the server ends, and with it the engine."""
    engine = RealTimeEngine(config.model, speed=config.speed, noise_seed=config.seed if config.noise else None)
    server = _make_server(make_app(_make_service(config, engine, vocabulary)), _ready_line(config, listener))
    stepping = asyncio.create_task(engine.run())
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True
        engine.abort_all()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    # The engine ends first only by a fault, which must not leave a server that never answers.
    await asyncio.wait([serving, stepping], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving
    stepping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stepping


def _make_service(config: ServeConfig, engine: RealTimeEngine, vocabulary: Vocabulary) -> Service:
    return Service(
        engine=engine,
        vocabulary=vocabulary,
        model_name=config.model_name,
        max_model_len=config.model.engine.max_model_len or 0,
        version=_version(),
        seed=config.seed,
        median_answer_tokens=config.median_answer_tokens,
        hash_key=HashKey(secrets.token_bytes(32)),
    )


def _ready_line(config: ServeConfig, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    speed = "as fast as it goes" if config.speed is None else f"speed {config.speed:g}"
    return f"sim serve: {config.model_name} at http://{shown}:{port} ({speed})"


def _make_server(app: Any, ready_line: str) -> _Server:
    # Its loggers would tell of every aborted stream; nothing of a request belongs in a log.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return _Server(
        uvicorn.Config(
            app,
            http="httptools",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_S,
        ),
        ready_line,
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _version() -> str:
    try:
        return importlib.metadata.version("kvtape")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return "unknown"
