"""Flags of ``sim serve``."""

import argparse
from pathlib import Path

from engines.routing import ROUTE_HELP
from sim.vllm.config import add_engine_flags
from tracefile.commandline.durations import duration
from tracefile.commandline.parser import seed

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
    add("--model", metavar="NAME", help="served model name (default: of model.json, or kvtape-sim)")
    add("--speed", default="1", metavar="X|max", help="virtual seconds per real one, such as 10; max: no sleeping")
    add("--seed", type=seed, default=0, help="seed of outputs and noise")
    add("--noise", action=argparse.BooleanOptionalAction, default=True, help="draw the model's noise (default: yes)")
    add("--output-tokens", type=float, default=200.0, metavar="N", help="median tokens of outputs without a limit")
    add("--engines", type=int, default=1, help="engines, each with a KV cache")
    add("--route", metavar="POLICY", help=f"{ROUTE_HELP[:-1]}; default round-robin)")
    add("--t0-ms", type=float, metavar="X", help="constant ms of a step, in place of the model's")
    add("--drain", type=duration, default="5s", help="time for running requests at SIGTERM")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from sim.serving import serve

    return serve.run(arguments)
