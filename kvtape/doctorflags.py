"""Flags of ``kvtape doctor``."""

import argparse
from pathlib import Path
from typing import Final

from engines.access import add_access_arguments

EPILOG: Final = """\
Exit codes: 0 no check failed; 1 a check failed; 2 bad input.

examples:
  kvtape doctor
  kvtape doctor --config kvtape.toml --probe
  kvtape doctor --url http://127.0.0.1:8000 --listen :8001 -o captures/monday.jsonl.zst
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``kvtape doctor``."""
    parser.add_argument("--url", metavar="URL", help="base URL of an engine to check")
    parser.add_argument("--listen", default="127.0.0.1:8001", metavar="HOST:PORT", help="address for a tap")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("."), metavar="PATH", help="trace to write, or its folder"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; the lines go to stderr")
    parser.add_argument(
        "--probe",
        action="store_true",
        help="send a short prompt twice to check reported cached tokens; it stays in the prefix cache",
    )
    add_access_arguments(parser, "calls to the engine")


def run(flags: argparse.Namespace) -> int:
    """Check this machine and the engine's settings: prefix cache, token ids, tokenizer."""
    from kvtape import doctor

    return doctor.run(flags)
