"""Real-time server of ``sim serve``: engines and their APIs until a signal."""

import asyncio
import contextlib
import gc
import os
import secrets
import signal
import socket
from dataclasses import dataclass
from typing import Any

from engines.routing import Route
from sim.latency.modelfile import Model
from sim.serving.apis import ChatEncoder, CompletionEncoder, read_chat, read_completion
from sim.serving.endpoint import Endpoint
from sim.serving.exchange import Exchange, Handler, HttpRequest
from sim.serving.pages import respond
from sim.serving.service import Fleet, Service
from sim.serving.vocabulary import Vocabulary
from tracefile.commandline.parser import VERSION
from tracefile.hashing.hashkey import HashKey
from tracefile.records.errors import InputError
from wire.loop import run as run_loop
from wire.server import BACKLOG, Server

GARBAGE_EVERY = 50_000
"""New objects between garbage collections: requests leave no cycles, and collection delays tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings from the command line."""

    host: str
    port: int
    """0: a free port, printed at startup."""
    model: Model
    model_name: str
    speed: float | None
    """Virtual seconds per real one; None: no sleeping."""
    seed: int
    noise: bool
    median_output_tokens: float
    engines: int
    route: Route
    drain_s: float


def serve(config: ServeConfig) -> None:
    run_loop(_serve(config, Vocabulary()))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        # A busy address has an errno with a short text; an unknown host has only a text.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        raise InputError(f"--listen {host}:{port}: {reason}; expected a free address of this machine") from None


async def _serve(config: ServeConfig, vocabulary: Vocabulary) -> None:
    """Run engines and server until a signal: SIGTERM lets outputs finish, Ctrl-C or a second signal aborts them.

    Signals are handled before the address accepts connections: a signal between the two was lost at times.
    """
    stopped, cut = asyncio.Event(), asyncio.Event()

    def stop(number: int) -> None:
        if stopped.is_set() or number == signal.SIGINT:
            cut.set()
        stopped.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    with _listen(config.host, config.port) as listener:
        await _serve_on(listener, config, vocabulary, stopped, cut)


async def _serve_on(
    listener: socket.socket, config: ServeConfig, vocabulary: Vocabulary, stopped: asyncio.Event, cut: asyncio.Event
) -> None:
    # Loaded modules are frozen: collecting them would stop the clock for tens of milliseconds.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_EVERY)
    service = _make_service(config, vocabulary)
    dispatch = _dispatcher(service)
    server = Server(lambda head, connection: Exchange(head, connection, dispatch), error_type="BadRequestError")
    stepping = asyncio.create_task(service.fleet.run())
    await server.listen_on(listener)
    print(_ready_line(config, listener), flush=True)
    # The engine ends first only by a fault, after which the server must not stay up without output.
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
    """Wait for the first result; cancel the other waits, but no tasks passed in."""
    tasks = [wait if isinstance(wait, asyncio.Task) else asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, wait in zip(tasks, waits, strict=True):
        if task is not wait:
            task.cancel()


def _dispatcher(service: Service) -> Handler:
    endpoints = {
        "/v1/completions": Endpoint(service, read_completion, CompletionEncoder),
        "/v1/chat/completions": Endpoint(service, read_chat, ChatEncoder),
    }

    def dispatch(request: HttpRequest, exchange: Exchange) -> None:
        if request.path in endpoints:
            endpoints[request.path](request, exchange)
        else:
            respond(service, request, exchange)

    return dispatch


def _make_service(config: ServeConfig, vocabulary: Vocabulary) -> Service:
    noise_seed = config.seed if config.noise else None
    return Service(
        fleet=Fleet(config.model, config.engines, config.route, speed=config.speed, noise_seed=noise_seed),
        vocabulary=vocabulary,
        model_name=config.model_name,
        max_model_len=config.model.engine.max_model_len or 0,
        version=VERSION,
        seed=config.seed,
        median_output_tokens=config.median_output_tokens,
        hash_key=HashKey(secrets.token_bytes(32)),
    )


def _ready_line(config: ServeConfig, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    speed = "as fast as it goes" if config.speed is None else f"speed {config.speed:g}"
    engines = "" if config.engines == 1 else f"{config.engines} engines, {config.route.text}, "
    return f"sim serve: {config.model_name} at http://{shown}:{port} ({engines}{speed})"
