"""Flags of ``sim run``."""

import argparse
from pathlib import Path

from sim.engine.deployment import add_deployment_flags
from sim.engine.fleetplan import add_fleet_flags
from sim.vllm.config import add_engine_flags
from tracefile.commandline.parser import seed

EPILOG = """\
examples:
  sim run monday.jsonl.zst --latency-model model.json -o predicted.jsonl.zst
  sim run monday.jsonl.zst --latency-model model.json -o fleet.jsonl.zst --replicas 4 --route prefix
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="trace to predict; not a trace that the model was fitted on")
    parser.add_argument(
        "--latency-model",
        type=Path,
        required=True,
        action="append",
        help="model.json from sim calibrate; repeat for each engine of a fleet",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        help="predicted trace (.gz and .zst compress)",
    )
    add_engine_flags(parser)
    add_fleet_flags(parser, several=False)
    add_deployment_flags(parser)
    parser.add_argument("--cold-prompts", action="store_true", help="no prefix hits: every block is unique")
    parser.add_argument(
        "--replay-sessions", action="store_true", help="a turn arrives its think time after its parent's predicted end"
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of the noise")
    parser.add_argument("--no-noise", action="store_true", help="median latencies instead of random draws")
    parser.add_argument("--overwrite", action="store_true", help="replace the outputs if they exist")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(arguments: argparse.Namespace) -> int:
    from sim.engine import run

    return run.run(arguments)
