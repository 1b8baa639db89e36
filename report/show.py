"""``report show``: every metric of one trace, its health checks, SLOs on it, as files and as a page; or a sweep."""

import argparse
import sys
from collections.abc import Sequence
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
from measure.sweepindex import INDEX
from report.output import add_page_argument, page_path, put_page, write_page
from tracefile.commandline.parser import Parser
from tracefile.commandline.printing import print_result, printable
from tracefile.records.errors import InputError
from tracefile.records.extras import lacking
from tracefile.records.latenames import LateModule, late_modules
from tracefile.storage.output import PARQUET, check_output

if TYPE_CHECKING:
    import numpy as np

    from measure.metrics import columns, sessions, slos, tables, trace
    from measure.runs import Run
    from report.grid import measured as sweeps
    from report.grid import panels
    from report.trace import measured, page
else:  # numpy and a page's libraries, which the flags need not
    np = LateModule("numpy")
    columns, sessions, slos, tables, trace = late_modules("measure.metrics", "columns sessions slos tables trace")
    sweeps, panels = LateModule("report.grid.measured"), LateModule("report.grid.panels")
    measured, page = late_modules("report.trace", "measured page")

TERMINAL_COLUMNS: Final = 100
TABLES: Final = ("requests.parquet", "sessions.parquet")
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
    """Print the metrics of a trace, or the points of a sweep; 1 if an SLO is missed."""
    sweep = [folder for folder in flags.trace if (folder / INDEX).is_file()]
    if sweep and len(sweep) == len(flags.trace):
        return show_sweep(sweep, flags)
    if len(flags.trace) > 1:
        raise InputError(f"{flags.trace[1]}: a second trace; expected one, folders with {INDEX}, or report compare")
    return show_trace(flags.trace[0], flags)


def show_sweep(folders: Sequence[Path], flags: argparse.Namespace) -> int:
    html = page_path(flags, folders)
    goals = slos.parse_slos(flags.slo, flags.slo_file, sweeps.labels_in(folders))
    grid = sweeps.read_grid(folders, goals, checked_gpus(flags.gpus))
    put_page(panels.grid_page(grid, "report show", "docs/sweep.md"), grid, as_json=flags.json, html=html)
    met = {point.settings["label"] for point in grid.points if point.meets is not False}
    return 0 if met == {point.settings["label"] for point in grid.points} else 1


def show_trace(path: Path, flags: argparse.Namespace) -> int:
    kv_bytes = checked_kv_bytes(flags.kv_bytes_per_token)
    limits, gpus = slos.parse_slos(flags.slo, flags.slo_file), checked_gpus(flags.gpus)
    html = page_path(flags, [path])
    if flags.files is not None:
        check_files(flags.files, path)
    run = trace.read_run(path)
    for warning in run.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    study = trace.study_chains(run, kv_bytes)
    metrics = trace.measure_run(run, gpus=gpus, slos=limits, study=study)
    if flags.by is not None:
        metrics = structs.replace(metrics, by_session=sessions.session_uses(run))
    found = measured.Measured(run, metrics, study)
    if html is not None:
        write_page(html, page.trace_page(found))
    if flags.files is not None:
        write_files(flags.files, run)
        print(printable(f"files: {flags.files}"), file=sys.stderr)
    lines = [f"{path.name}: {tables.headline(metrics)}", *wrap(tables.verdict(metrics), TERMINAL_COLUMNS)]
    lines += tables.metric_lines(metrics)
    print_result(metrics, lines, as_json=flags.json)
    return 0 if all(slo.met for slo in metrics.slos) else 1


def check_files(folder: Path, trace: Path) -> None:
    """Raise InputError unless the tables can be written: over nothing but earlier ones."""
    if not folder.resolve().parent.is_dir() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"--files {folder}: expected a folder to write in")
    for name in TABLES if folder.is_dir() else ():
        check_output(folder / name, PARQUET, [trace], "--files")


def write_files(folder: Path, run: "Run") -> None:
    """Write both tables. Raises InputError without pyarrow, and where the folder cannot be written."""
    tables_of = columns.request_table, columns.session_table
    try:
        folder.mkdir(exist_ok=True)
        for name, table_of in zip(TABLES, tables_of, strict=True):
            write_parquet(table_of(run), folder / name)
    except OSError as error:
        raise InputError(f"--files {folder}: {error.strerror or error}; expected a writable folder") from error


def write_parquet(table: "columns.Table", path: Path) -> None:
    """Write a table as Parquet; NaN is null. Raises InputError without pyarrow."""
    try:
        import pyarrow as pa  # noqa: PLC0415 - optional
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError:
        raise InputError(f"Parquet: {lacking('pyarrow')}") from None

    def type_of(column: "columns.Column") -> pa.DataType:
        if isinstance(column, columns.Lists):
            return pa.list_(pa.float64())
        return pa.string() if isinstance(column, list) else pa.from_numpy_dtype(np.asarray(column).dtype)

    schema = pa.schema([(name, type_of(column)) for name, column in table.items()])
    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        for part in columns.parts(table):
            file.write_batch(pa.RecordBatch.from_pydict(part, schema=schema))
