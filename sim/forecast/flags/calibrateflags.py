"""Flags of ``sim calibrate``; ``sim.forecast.calibrate`` does the work."""

import argparse
from pathlib import Path
from typing import get_args

from sim.forecast.flags.validateflags import add_validation_flags
from sim.latency.terms import EXTRA_TERMS, FrontendPlacement
from sim.vllm.config import add_engine_flags
from tracefile.commandline.parser import Parser, seed

EPILOG = """\
Capture three calibrations and more, before, between and after the loads: loadgen --pattern calibration --for TRACE.
Exit codes: 0 done, 1 a gate failed, 2 bad input, 3 no gate failed but one is too uncertain to say.

examples:
  sim calibrate calibration-?.jsonl.zst --against monday.jsonl.zst -o model.json --max-num-seqs 256
  sim calibrate --pace-from tuesday.jsonl.zst --latency-model model.json -o model-tuesday.json
"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("traces", type=Path, nargs="*", metavar="CAPTURE", help="captures of one engine, to fit")
    parser.add_argument(
        "--against",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="GATE",
        help="captures of the same engine to validate on (default: fit alone)",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="MODEL", help="model.json to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the model if it exists")
    pace = parser.add_argument_group("the pace of today, in place of a fit: does the model still hold?").add_argument
    pace("--pace-from", type=Path, metavar="CAPTURE", help="scale --latency-model by the step times of any traffic")
    pace("--latency-model", type=Path, metavar="MODEL", help="model.json whose shape stays")
    parser.add_argument("--bootstrap", type=int, default=400, help="resamples for intervals; 0: none")
    parser.add_argument("--seed", type=seed, default=0, help="seed of resampling and of the ensemble")
    parser.add_setting(
        "--api-server",
        dest="frontend",
        choices=get_args(FrontendPlacement),
        help="API server: works on all requests at once (parallel), on one at a time (serial), or so on the engine's "
        "core (shared_core); default: the simplest that predicts best",
    )
    parser.add_setting(
        "--term",
        action="append",
        choices=[*EXTRA_TERMS, "none"],
        default=[],
        help="cost to fit beyond the default ones; repeatable (none: no more; default: those that improve forecasts of "
        "captures left out)",
    )
    add_engine_flags(parser)
    add_validation_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from sim.forecast import calibrate

    return calibrate.run(arguments)
