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
    parser.add_argument(
        "--cache-tokens", metavar="N,N…", help="show these cache sizes, in tokens, such as 100000,200000"
    )
    add_kv_bytes_argument(parser)
    parser.add_argument(
        "--model-config", type=Path, metavar="PATH", help="the same from a Hugging Face config.json or its folder"
    )
    parser.add_argument("--reuse", action="store_true", help="times and distances between uses of a block, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the complete curve")
    add_page_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    from sim.cache import curve

    return curve.run(arguments)
