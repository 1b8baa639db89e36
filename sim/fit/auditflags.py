"""Flags of ``sim audit``."""

import argparse
from pathlib import Path

from sim.vllm.config import add_engine_flags

EPILOG = "examples:\n  sim audit monday.jsonl.zst --min-exact-share 0.99\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="a captured trace with block hashes and reported cached tokens")
    parser.add_argument(
        "--min-exact-share", type=float, metavar="SHARE", help="exit 1 if fewer requests than this share are exact"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every difference")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from sim.fit import audit

    return audit.run(arguments)
