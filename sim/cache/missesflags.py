"""Flags of ``sim misses``."""

import argparse

from sim.cache.poolflags import add_pool_flags

EPILOG = """\
examples:
  sim misses monday.jsonl.zst --num-gpu-blocks 20000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pool_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    from sim.cache import misses

    return misses.run(arguments)
