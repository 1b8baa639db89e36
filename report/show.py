"""``report show``: latency, throughput and cache metrics of a trace, health checks and SLOs; or a sweep."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Final

import numpy as np
from msgspec import structs

from measure.metrics import columns, sessions, slos, tables, trace
from measure.metrics.flags import checked_gpus, checked_kv_bytes
from measure.runs import Run
from measure.sweepindex import INDEX
from report.grid import measured as sweeps
from report.grid import panels
from report.output import page_path, put_page, write_page
from report.pages.panels import SCREEN_COLUMNS
from report.trace import measured, page
from tracefile.commandline.printing import print_result, printable
from tracefile.records.errors import InputError
from tracefile.records.extras import missing_package
from tracefile.storage.output import PARQUET, check_output

TABLES: Final = ("requests.parquet", "sessions.parquet")


def run(flags: argparse.Namespace) -> int:
    """Print the metrics of a trace or the points of a sweep; 1 if a latency or other SLO is missed."""
    sweep = [folder for folder in flags.trace if (folder / INDEX).is_file()]
    if sweep and len(sweep) == len(flags.trace):
        return show_sweep(sweep, flags)
    if len(flags.trace) > 1:
        raise InputError(f"{flags.trace[1]}: a second trace; expected one, folders with {INDEX}, or report compare")
    return show_trace(flags.trace[0], flags)


def show_sweep(folders: Sequence[Path], flags: argparse.Namespace) -> int:
    html = page_path(flags, folders)
    goals = slos.parse_slos(flags.slo, sweeps.labels_in(folders))
    grid = sweeps.read_grid(folders, goals, checked_gpus(flags.gpus))
    put_page(panels.grid_page(grid, "report show", "docs/sweep.md"), grid, as_json=flags.json, html=html)
    met = {point.settings["label"] for point in grid.points if point.meets is not False}
    return 0 if met == {point.settings["label"] for point in grid.points} else 1


def show_trace(path: Path, flags: argparse.Namespace) -> int:
    kv_bytes = checked_kv_bytes(flags.kv_bytes_per_token)
    limits, gpus = slos.parse_slos(flags.slo), checked_gpus(flags.gpus)
    html = page_path(flags, [path])
    if flags.files is not None:
        check_files(flags.files, path)
    run = trace.read_run(path)
    for warning in run.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    analysis = trace.analyse_chains(run, kv_bytes)
    metrics = trace.measure_run(run, gpus=gpus, slos=limits, analysis=analysis)
    if flags.by is not None:
        metrics = structs.replace(metrics, by_session=sessions.session_uses(run))
    material = measured.Measured(run, metrics, analysis)
    if html is not None:
        write_page(html, page.trace_page(material))
    if flags.files is not None:
        write_files(flags.files, run)
        print(printable(f"files: {flags.files}"), file=sys.stderr)
    lines = [f"{path.name}: {tables.headline(metrics)}", *wrap(tables.verdict(metrics), SCREEN_COLUMNS)]
    lines += tables.metric_lines(metrics)
    print_result(metrics, lines, as_json=flags.json)
    return 0 if all(slo.met for slo in metrics.slos) else 1


def check_files(folder: Path, trace: Path) -> None:
    """Raise InputError unless the tables are writable, and replace only earlier tables."""
    if not folder.resolve().parent.is_dir() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"--files {folder}: expected a folder to write in")
    for name in TABLES if folder.is_dir() else ():
        check_output(folder / name, PARQUET, [trace], "--files")


def write_files(folder: Path, run: Run) -> None:
    """Write request and session tables. Raises InputError without pyarrow or a writable folder."""
    tables_of = columns.request_table, columns.session_table
    try:
        folder.mkdir(exist_ok=True)
        for name, table_of in zip(TABLES, tables_of, strict=True):
            write_parquet(table_of(run), folder / name)
    except OSError as error:
        raise InputError(f"--files {folder}: {error.strerror or error}; expected a writable folder") from error


def write_parquet(table: columns.Table, path: Path) -> None:
    """Write a table as Parquet; NaN is null. Raises InputError without pyarrow."""
    try:
        import pyarrow as pa  # noqa: PLC0415 - optional
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError:
        raise InputError(f"Parquet: {missing_package('pyarrow')}") from None

    def type_of(column: columns.Column) -> pa.DataType:
        if isinstance(column, columns.Lists):
            return pa.list_(pa.float64())
        return pa.string() if isinstance(column, list) else pa.from_numpy_dtype(np.asarray(column).dtype)

    schema = pa.schema([(name, type_of(column)) for name, column in table.items()])
    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        for chunk in columns.parts(table):
            file.write_batch(pa.RecordBatch.from_pydict(chunk, schema=schema))
