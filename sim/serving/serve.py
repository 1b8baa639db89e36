"""``sim serve``: an OpenAI-compatible engine without a model, which keeps the time that a model of one predicts."""

import argparse
import asyncio
import contextlib
import gc
import importlib.metadata
import os
import secrets
import signal
import socket
from typing import Any

from sim.serving.apis.chats import Chats
from sim.serving.apis.completions import Completions
from sim.serving.apis.messages import Messages
from sim.serving.apis.responses import Responses
from sim.serving.controlapp import AsgiPages, make_app
from sim.serving.endpoint import Endpoint
from sim.serving.engine.faults import Faults
from sim.serving.engine.service import Fleet, Service
from sim.serving.exchange import Exchange, Handler, HttpRequest
from sim.serving.requests.tokenizer import TokenizerVocabulary
from sim.serving.requests.vocabulary import PieceVocabulary, Spelling, Vocabulary
from sim.serving.settings import ServeConfig, add_arguments, read_config
from tracefile import HashKey
from tracefile.records.errors import InputError
from wire.loop import run as run_loop
from wire.server import BACKLOG, Server

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
        raise InputError(f"--listen {host}:{port}: {reason}") from None


async def _serve(config: ServeConfig, vocabulary: Vocabulary, listener: socket.socket) -> None:
    """Engines and server side by side until a signal: SIGTERM lets answers end, Ctrl-C or a second one cuts them."""
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
    # The engine ends first only by a fault, which must not leave a server that never answers.
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
    pages = AsgiPages(make_app(service))
    endpoints = {
        "/v1/completions": Endpoint(service, Completions()),
        "/v1/chat/completions": Endpoint(service, Chats()),
        "/v1/messages": Endpoint(service, Messages()),
        "/v1/responses": Endpoint(service, Responses()),
    }

    def dispatch(request: HttpRequest, exchange: Exchange) -> None:
        endpoints.get(request.path, pages)(request, exchange)

    return dispatch


def _make_service(config: ServeConfig, vocabulary: Vocabulary) -> Service:
    noise_seed = config.seed if config.noise else None
    return Service(
        fleet=Fleet(config.model, config.engines, config.route, speed=config.speed, noise_seed=noise_seed),
        vocabulary=vocabulary,
        spelling=Spelling(vocabulary),
        model_name=config.model_name,
        max_model_len=config.model.engine.max_model_len or 0,
        version=_version(),
        seed=config.seed,
        median_answer_tokens=config.median_answer_tokens,
        tool_share=config.tool_share,
        faults=Faults(config.faults, config.seed, config.fault_control),
        hash_key=HashKey(secrets.token_bytes(32)),
    )


def _ready_line(config: ServeConfig, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    speed = "as fast as it goes" if config.speed is None else f"speed {config.speed:g}"
    engines = "" if config.engines == 1 else f"{config.engines} engines, {config.route}, "
    return f"sim serve: {config.model_name} at http://{shown}:{port} ({engines}{speed})"


def _version() -> str:
    try:
        return importlib.metadata.version("kvtape")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return "unknown"
