"""Our own files: requests and sessions as CSV, JSONL and Parquet, and spans as ``tracefile convert --to otlp``."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np

from measure.metrics.columns import Column, Lists, Table, parts, request_table, session_table
from measure.runs import Run
from report.files.measured import Lacking, Measured, Writer, write_jsonl
from tracefile.exporters.formats import Export, export_lines
from tracefile.exporters.loss import Loss
from tracefile.files.reading import open_trace
from tracefile.records.errors import InputError


def _write_csv(table: Table, path: Path) -> None:
    """Write null as nothing and a list as its values between semicolons."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table)
        for part in parts(table):
            for name, column in table.items():
                if isinstance(column, Lists):
                    part[name] = [";".join(map(repr, values)) for values in part[name]]
            writer.writerows(zip(*part.values(), strict=True))


def _write_parquet(table: Table, path: Path) -> None:
    try:
        import pyarrow as pa  # noqa: PLC0415 - optional
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError:
        raise Lacking("needs pyarrow: pip install kvtape[parquet]") from None

    def type_of(column: Column) -> pa.DataType:
        if isinstance(column, Lists):
            return pa.list_(pa.float64())
        return pa.string() if isinstance(column, list) else pa.from_numpy_dtype(np.asarray(column).dtype)

    schema = pa.schema([(name, type_of(column)) for name, column in table.items()])
    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        for part in parts(table):
            file.write_batch(pa.RecordBatch.from_pydict(part, schema=schema))


def _write_spans(measured: Measured, path: Path) -> None:
    loss = Loss()
    try:
        with open_trace(measured.path) as reader, open(path, "wb") as file:
            file.writelines(export_lines("otlp", Export(reader.meta, reader, str(measured.path), loss)))
    except InputError as error:  # none with lengths and arrivals, or stdin, which is read by now
        raise Lacking(f"{loss.reasons()} in any request" if loss.left_out else str(error)) from None


def _of(table_of: Callable[[Run], Table], write: Callable[[Table, Path], None]) -> Writer:
    return lambda measured, path: write(table_of(measured.run), path)


FILES: dict[str, Writer] = {
    f"{name}.{suffix}": _of(table_of, write)
    for name, table_of in (("requests", request_table), ("sessions", session_table))
    for suffix, write in (("parquet", _write_parquet), ("csv", _write_csv), ("jsonl", write_jsonl))
} | {"spans.otlp.jsonl": _write_spans}
"""Writers by file name."""
