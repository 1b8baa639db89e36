"""``report show``: every metric of one trace, its health checks, SLOs on it, the same as files and as a page."""

import argparse
import sys
from pathlib import Path
from textwrap import wrap
from typing import Final

from measure.enginesteps import check_steps
from measure.metrics.flags import (
    add_gpus_argument,
    add_kv_bytes_argument,
    add_slo_arguments,
    checked_gpus,
    checked_kv_bytes,
)
from measure.metrics.slos import parse_slos
from measure.metrics.tables import headline, metric_lines, verdict
from measure.metrics.trace import measure_run, read_run, study_chains
from report.files.folder import check_folder, write_files
from report.files.measured import Measured
from report.output import add_picture_arguments, pictures_of
from tracefile.commandline.printing import print_result, printable
from tracefile.records.errors import InputError

EPILOG: Final = """\
Every metric is defined in docs/metrics.md. Exit codes: 0 done, 1 an SLO is missed, 2 bad input.

examples:
  report show run.jsonl.zst --gpus 8 --html run.html --files run-files
  report show run.jsonl.zst --slo 'ttft.p99<=500ms' --slo 'session.ttfat.p90<=20s' --slo 'turns2+.ttft.p90<=200ms'
"""

TERMINAL_COLUMNS: Final = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace of any format that tracefile reads")
    add_gpus_argument(parser)
    add_kv_bytes_argument(parser)
    add_slo_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    parser.add_argument(
        "--files", type=Path, metavar="DIR", help="write tables, a timeline, evalscope's and Veeksha's files there"
    )
    parser.add_argument(
        "--steps", type=Path, metavar="FILE", help="steps of sim run --steps, for the timeline of --files"
    )
    add_picture_arguments(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the files of an earlier --files DIR")


def run(flags: argparse.Namespace) -> int:
    """Print the metrics of a trace; 1 if it misses an SLO."""
    kv_bytes = checked_kv_bytes(flags.kv_bytes_per_token)
    slos, gpus = parse_slos(flags.slo, flags.slo_file), checked_gpus(flags.gpus)
    if flags.files is not None:
        check_folder(flags.files, flags.trace, overwrite=flags.overwrite)
    pictures = pictures_of(flags, [flags.trace])
    if flags.steps is not None and flags.files is None:
        raise InputError(f"--steps {flags.steps}: without --files; expected --files DIR, whose timeline has the steps")
    run = read_run(flags.trace)
    if flags.steps is not None:
        check_steps(flags.steps, flags.trace, run.meta)
    study = study_chains(run, kv_bytes)
    metrics = measure_run(run, gpus=gpus, slos=slos, study=study)
    measured = Measured(flags.trace, run, metrics, slos, flags.steps, study)
    if pictures.wanted:
        # The page's libraries take half a second to import: only who wants a page waits for them.
        from report.trace.page import draw_chapters, render_trace, trace_figures  # noqa: PLC0415

        drawn = draw_chapters(measured)
        pictures.write(render_trace(measured, drawn), trace_figures(drawn))
    if flags.files is not None:
        for line in write_files(flags.files, measured):
            print(printable(f"{flags.files}: {line}"), file=sys.stderr)
        print(printable(f"files: {flags.files}"), file=sys.stderr)
    told = [f"{flags.trace.name}: {headline(metrics)}", *wrap(verdict(metrics), TERMINAL_COLUMNS)]
    print_result(metrics, [*told, *metric_lines(metrics)], as_json=flags.json)
    return 0 if all(slo.met for slo in metrics.slos) else 1
