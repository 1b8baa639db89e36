"""Flags of ``sim sweep``; ``sim.forecast.sweep`` does the work."""

import argparse
from pathlib import Path

from measure.metrics.flags import add_gpus_argument
from sim.forecast.scenarios import add_capture_arguments
from tracefile.commandline.parser import Parser

EPILOG = "examples:\n  sim sweep grid.toml monday.jsonl.zst --latency-model model.json --slo 'ttft.p90<=500ms'\n"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("grid", type=Path, help="TOML file of the axes and their values (docs/capacity.md)")
    add_capture_arguments(parser)
    parser.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="THRESHOLD",
        help="limit of the chosen point, as ttft.p90<=500ms or hit_rate>=30%% (default: today's TTFT p90; repeatable)",
    )
    parser.add_argument("--gpu-price", type=float, help="price of a GPU and hour, such as 2.5, for the cost of tokens")
    add_gpus_argument(parser)
    parser.add_setting("--procs", type=int, help="processes (default: one per core)")


def run(arguments: argparse.Namespace) -> int:
    from sim.forecast import sweep

    return sweep.run(arguments)
