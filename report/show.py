"""``report show``: every metric of one trace, its health checks, SLOs on it, the same as files and as a page."""

import argparse
import sys
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Final

from msgspec import structs

from measure.metrics.flags import (
    add_gpus_argument,
    add_kv_bytes_argument,
    add_slo_arguments,
    checked_gpus,
    checked_kv_bytes,
)
from report.output import add_page_argument, page_path, write_page
from tracefile.commandline.configfile import refuse_without
from tracefile.commandline.printing import print_result, printable
from tracefile.records.latenames import LateModule, late_modules

if TYPE_CHECKING:
    from measure.metrics import sessions, slos, tables, trace
    from report.files import folder, measured
    from report.trace import page
else:  # numpy and a page's libraries, which the flags need not
    sessions, slos, tables, trace = late_modules("measure.metrics", "sessions slos tables trace")
    folder, measured = late_modules("report.files", "folder measured")
    page = LateModule("report.trace.page")

EPILOG: Final = """\
Every metric is defined in docs/metrics.md. Exit codes: 0 done, 1 an SLO is missed, 2 bad input.

examples:
  report show run.jsonl.zst --gpus 8 --html run.html --files run-files
  report show run.jsonl.zst --by session
  report show run.jsonl.zst --slo 'ttft.p99<=500ms' --slo 'session.ttfat.p90<=20s' --slo 'turns2+.ttft.p90<=200ms'
"""

TERMINAL_COLUMNS: Final = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace of any format that tracefile reads")
    add_gpus_argument(parser)
    add_kv_bytes_argument(parser)
    add_slo_arguments(parser)
    parser.add_argument("--by", choices=["session"], help="list the sessions that the prefix cache serves the most")
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    parser.add_argument("--files", type=Path, metavar="DIR", help="write tables and a timeline there")
    add_page_argument(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the files of an earlier --files DIR")


def run(flags: argparse.Namespace) -> int:
    """Print the metrics of a trace; 1 if it misses an SLO."""
    kv_bytes = checked_kv_bytes(flags.kv_bytes_per_token)
    limits, gpus = slos.parse_slos(flags.slo, flags.slo_file), checked_gpus(flags.gpus)
    if flags.files is not None:
        folder.check_folder(flags.files, flags.trace, overwrite=flags.overwrite)
    else:
        refuse_without("--files", flags, ("overwrite",))
    html = page_path(flags, [flags.trace])
    run = trace.read_run(flags.trace)
    for warning in run.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    study = trace.study_chains(run, kv_bytes)
    metrics = trace.measure_run(run, gpus=gpus, slos=limits, study=study)
    if flags.by is not None:
        metrics = structs.replace(metrics, by_session=sessions.session_uses(run))
    found = measured.Measured(flags.trace, run, metrics, limits, study)
    if html is not None:
        write_page(html, page.render_trace(found, page.draw_chapters(found)))
    if flags.files is not None:
        for line in folder.write_files(flags.files, found):
            print(printable(f"{flags.files}: {line}"), file=sys.stderr)
        print(printable(f"files: {flags.files}"), file=sys.stderr)
    lines = [f"{flags.trace.name}: {tables.headline(metrics)}", *wrap(tables.verdict(metrics), TERMINAL_COLUMNS)]
    lines += [*tables.metric_lines(metrics), *filter(None, [found.left_out])]
    print_result(metrics, lines, as_json=flags.json)
    return 0 if all(slo.met for slo in metrics.slos) else 1
