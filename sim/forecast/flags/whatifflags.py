"""Flags of ``sim what-if``; ``sim.forecast.whatif`` does the work."""

import argparse

from report.output import add_verbose_argument
from sim.forecast.scenarios import add_capture_arguments, add_scenario_flags
from tracefile.commandline.parser import Parser

EPILOG = "examples:\n  sim what-if monday.jsonl.zst --latency-model model.json --num-gpu-blocks 20000,40000,80000\n"


def add_arguments(parser: Parser) -> None:
    add_capture_arguments(parser)
    add_verbose_argument(parser)
    parser.add_argument(
        "--base",
        metavar="NAME=VALUE,…",
        help="forecast that effects are against, such as rate=0.1,num-gpu-blocks=29600 (default: the capture)",
    )
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="THRESHOLD",
        help="exit 1 unless every scenario keeps this, 3 if members differ, as hit_rate.difference>=-1%% or "
        "ttft.p95.ratio<=1.05",
    )
    add_scenario_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from sim.forecast import whatif

    return whatif.run(arguments)
