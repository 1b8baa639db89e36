"""Flags of ``report show``."""

import argparse
from pathlib import Path
from typing import Final

from measure.metrics.flags import add_gpus_argument, add_kv_bytes_argument, add_slo_arguments
from report.output import add_page_argument
from tracefile.commandline.parser import Parser

EPILOG: Final = """\
The folder of a sweep holds sweep.jsonl, as loadgen sweep writes it. Every metric is defined in docs/metrics.md.
Exit codes: 0 done, 1 an SLO is missed (of a sweep: by every load of a label), 2 bad input.

examples:
  report show run.jsonl.zst --gpus 8 --html run.html --slo 'ttft.p99<=500ms' --slo 'turns2+.ttft.p90<=200ms'
  report show run.jsonl.zst --by session
  report show nightly/ --html sweep.html --slo 'ttft.p90<=500ms'
"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "trace", type=Path, nargs="+", metavar="TRACE|DIR", help="a trace of any format, or folders of sweeps"
    )
    add_page_argument(parser)
    add_slo_arguments(parser)
    parser.add_argument("--by", choices=["session"], help="list the sessions that the prefix cache serves the most")
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    parser.add_argument("--files", type=Path, metavar="DIR", help="write metrics of requests and sessions as Parquet")
    add_gpus_argument(parser)
    add_kv_bytes_argument(parser)


def run(flags: argparse.Namespace) -> int:
    from report import show

    return show.run(flags)
