"""Flags of ``sim curve``."""

import argparse
from pathlib import Path

from measure.metrics.flags import add_kv_bytes_argument
from report.output import add_page_argument
from sim.cache.poolflags import add_trace_flags

EPILOG = """\
examples:
  sim curve monday.jsonl.zst --cache-tokens 100000,400000
  sim curve monday.jsonl.zst --reuse --json > curve.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_flags(parser)
    parser.add_argument("--cache-tokens", metavar="N,N…", help="cache sizes to show, in tokens, such as 100000,200000")
    add_kv_bytes_argument(parser)
    parser.add_argument(
        "--model-config", type=Path, metavar="PATH", help="KV bytes per token from a Hugging Face config.json"
    )
    parser.add_argument("--reuse", action="store_true", help="also show times and distances between uses of a block")
    parser.add_argument("--json", action="store_true", help="print the complete curve as JSON")
    add_page_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    from sim.cache import curve

    return curve.run(arguments)
