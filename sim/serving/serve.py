"""``sim serve``: OpenAI-compatible engine without a model; its latency is that of a latency model."""

import argparse

import msgspec

from engines.routing import parse_route
from sim.latency.modelfile import Model, Parameter, default_model, engine_with, load_model
from sim.serving import server
from sim.vllm.config import engine_overrides
from tracefile.commandline.configfile import refuse_without
from tracefile.commandline.parser import same_named
from tracefile.records.errors import InputError
from wire.errors import WireError
from wire.url import parse_listen

MAX_ENGINES = 64


def read_config(arguments: argparse.Namespace) -> server.ServeConfig:
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
    if not 1 <= arguments.engines <= MAX_ENGINES:
        raise InputError(f"--engines: {arguments.engines}; expected 1 to {MAX_ENGINES}")
    if arguments.engines == 1:
        refuse_without("--engines of 2 or more", arguments, ("route",))
    settings = {
        "host": host,
        "port": port,
        "model": model,
        "model_name": arguments.model or model.model_name or "kvtape-sim",
        "speed": _read_speed(arguments.speed),
        "median_output_tokens": arguments.output_tokens,
        "route": parse_route(arguments.route or "round-robin"),
        "drain_s": arguments.drain,
    }
    return server.ServeConfig(**(same_named(server.ServeConfig, arguments) | settings))


def _read_model(arguments: argparse.Namespace) -> Model:
    model = default_model() if arguments.latency_model is None else load_model(arguments.latency_model)
    parameters, t0_ms = dict(model.parameters), arguments.t0_ms
    if t0_ms is not None:
        if not 0.0 <= t0_ms < float("inf"):
            raise InputError(f"--t0-ms: {t0_ms}; expected a finite number, 0 or more")
        parameters["t0_ms"] = Parameter(value=t0_ms, unit="ms/step", note="from the command line")
    engine = engine_with(model.engine, engine_overrides(arguments))
    capacity = engine.usable_blocks * engine.block_size
    if arguments.max_model_len is not None and arguments.max_model_len > capacity:
        raise InputError(
            f"--max-model-len: {arguments.max_model_len}; expected at most the KV cache's {capacity} tokens"
        )
    length = capacity if engine.max_model_len is None else min(engine.max_model_len, capacity)
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


def run(arguments: argparse.Namespace) -> int:
    server.serve(read_config(arguments))
    return 0
