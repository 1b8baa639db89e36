"""Flags of ``sim validate``; ``sim.forecast.validate`` does the work."""

import argparse
from pathlib import Path

from report.output import add_page_argument, add_verbose_argument
from sim.vllm.config import add_engine_flags
from tracefile.commandline.parser import Parser, seed

EPILOG = (
    "Exit codes: 0 done, 1 a gate failed, 2 bad input, 3 no gate failed but one is too uncertain to say.\n\n"
    "examples:\n  sim validate monday.jsonl.zst --latency-model model.json --html validated.html\n"
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("trace", type=Path, help="the capture to forecast; never one that the model was fitted on")
    parser.add_argument("--latency-model", type=Path, required=True, help="model.json from sim calibrate")
    parser.add_argument(
        "--repeat",
        type=Path,
        action="append",
        default=[],
        metavar="OTHER",
        help="another capture of the same load: errors are against the mean of all (repeatable)",
    )
    parser.add_argument(
        "--cold",
        type=Path,
        action="append",
        default=[],
        metavar="COLD",
        help="the same load captured without sharing: forecast from TRACE too (again: its repeats)",
    )
    add_engine_flags(parser)
    add_validation_flags(parser)
    parser.add_argument("--seed", type=seed, default=0, help="seed of the ensemble and of resampling")
    parser.add_argument("--bootstrap", type=int, default=500, help="draws for intervals")


def add_validation_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--members", type=int, default=64, help="forecasts of the load, each with its own parameters and noise"
    )
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="EXPRESSION",
        help="exit 1 unless it holds, 3 if too uncertain, as ttft.p90.error<=10%% (repeatable)",
    )
    parser.add_argument(
        "--no-default-gates",
        action="store_true",
        help="use --gate alone; default: cached tokens, TTFT p50, p90, p99, bands (docs/model.md)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    add_page_argument(parser)
    add_verbose_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    from sim.forecast import validate

    return validate.run(arguments)
