"""Flags of ``sim search``; ``sim.forecast.search`` does the work."""

import argparse
from typing import Final

from sim.forecast.scenarios import add_capture_arguments, add_scenario_flags
from tracefile.commandline.parser import Parser

MINIMIZED: Final = ("num-gpu-blocks", "replicas", "host-blocks")

EPILOG = """\
examples:
  sim search monday.jsonl.zst --latency-model model.json --minimize num-gpu-blocks --target 'ttft.p90<=500ms'
  sim search monday.jsonl.zst --latency-model model.json --maximize rate --target 'ttft.p99<=2s'
"""


def add_arguments(parser: Parser) -> None:
    add_capture_arguments(parser)
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--minimize", choices=MINIMIZED, help="find the smallest value (this or --maximize)")
    goal.add_argument("--maximize", choices=["rate"], help="find the largest value (this or --minimize)")
    parser.add_argument(
        "--target",
        required=True,
        metavar="THRESHOLD",
        help="[COHORT.]METRIC.pNN<=LIMIT of ttft, itl or e2e, as turns2+.ttft.p90<=500ms, or hit_rate>=30%%",
    )
    parser.add_argument(
        "--between",
        metavar="LOW,HIGH",
        help="range to search, such as 2,8 (default: every cache, rates 0.1 to 10, 1 to 16 replicas)",
    )
    add_scenario_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from sim.forecast import search

    return search.run(arguments)
