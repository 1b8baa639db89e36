"""A run's metrics as Parquet: a row a request, a row a session."""

from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from measure.metrics.columns import Column, Lists, Table, parts, request_table, session_table
from measure.runs import Run
from tracefile.records.errors import InputError
from tracefile.records.extras import lacking
from tracefile.storage.output import PARQUET, check_output

TABLES: Final = {"requests.parquet": request_table, "sessions.parquet": session_table}


def check_files(folder: Path, trace: Path) -> None:
    """Raise InputError unless the tables can be written: over nothing but earlier ones."""
    if not folder.resolve().parent.is_dir() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"--files {folder}: expected a folder to write in")
    for name in TABLES if folder.is_dir() else ():
        check_output(folder / name, PARQUET, [trace], "--files")


def write_files(folder: Path, run: Run) -> None:
    """Write both tables. Raises InputError without pyarrow, and where the folder cannot be written."""
    try:
        folder.mkdir(exist_ok=True)
        for name, table_of in TABLES.items():
            write_parquet(table_of(run), folder / name)
    except OSError as error:
        raise InputError(f"--files {folder}: {error.strerror or error}; expected a writable folder") from error


def write_parquet(table: Table, path: Path | BinaryIO) -> None:
    """Write a table as Parquet; NaN is null. Raises InputError without pyarrow."""
    try:
        import pyarrow as pa  # noqa: PLC0415 - optional
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError:
        raise InputError(f"Parquet: {lacking('pyarrow')}") from None

    def type_of(column: Column) -> pa.DataType:
        if isinstance(column, Lists):
            return pa.list_(pa.float64())
        return pa.string() if isinstance(column, list) else pa.from_numpy_dtype(np.asarray(column).dtype)

    schema = pa.schema([(name, type_of(column)) for name, column in table.items()])
    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        for part in parts(table):
            file.write_batch(pa.RecordBatch.from_pydict(part, schema=schema))
