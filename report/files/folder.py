"""A folder of files: our tables and spans, a timeline, evalscope's and Veeksha's.

It is written beside its place and renamed: whole or not at all, and over nothing but its own like.
"""

import csv
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from measure.metrics.columns import Column, Lists, Table, parts, request_table, session_table
from measure.runs import Run
from report.files import evalscope, timeline, veeksha
from report.files.measured import Lacking, Measured, Writer, write_jsonl
from tracefile.exporters.formats import Export, export_lines
from tracefile.exporters.loss import Loss
from tracefile.files.reading import open_trace
from tracefile.records.errors import InputError
from tracefile.records.extras import lacking


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


def write_parquet(table: Table, path: Path | BinaryIO) -> None:
    """Write a table as Parquet; NaN is null. Raises Lacking without pyarrow."""
    try:
        import pyarrow as pa  # noqa: PLC0415 - optional
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError:
        raise Lacking(lacking("pyarrow")) from None

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


FILES: Final[dict[str, Writer]] = {
    **{
        f"{name}.{suffix}": _of(table_of, write)
        for name, table_of in (("requests", request_table), ("sessions", session_table))
        for suffix, write in (("parquet", write_parquet), ("csv", _write_csv), ("jsonl", write_jsonl))
    },
    **{"spans.otlp.jsonl": _write_spans, **timeline.FILES, **evalscope.FILES, **veeksha.FILES},
}
"""Writers by file name."""


def check_folder(folder: Path, trace: Path, *, overwrite: bool) -> None:
    """Raise InputError unless the folder is new or empty, or may be replaced and holds no other file."""
    where = f"--files {folder}"
    if not folder.resolve().parent.is_dir():
        raise InputError(f"{where}: its folder is not there; expected one to write in")
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise InputError(f"{where}: is a file; expected a folder")
    files = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    if files and not overwrite:
        raise InputError(f"{where}: not empty; expected a new folder, or --overwrite")
    if trace.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{where}: holds the trace {trace}; expected another folder")
    for path in files:
        name = path.relative_to(folder).as_posix()
        if name not in FILES:
            raise InputError(f"{where}: holds {name}, which is none of its files; expected another folder")


def write_files(folder: Path, measured: Measured) -> list[str]:
    """Write every file that the trace has the facts for; say the others."""
    left_out: dict[str, str] = {}
    with _whole(folder) as new:
        for name, write in FILES.items():
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                write(measured, path)
            except Lacking as lacking:
                path.unlink(missing_ok=True)
                left_out[name] = str(lacking)
    return _told_of(left_out)


def _told_of(left_out: Mapping[str, str]) -> list[str]:
    """Return a line a file, or one for all files of a kind in a folder that the same reason leaves out."""
    kinds = [f"{Path(name).parent}/*{Path(name).suffix}" for name in FILES]
    said = {}
    for name, reason in left_out.items():
        kind = f"{Path(name).parent}/*{Path(name).suffix}"
        alike = [one for one, why in left_out.items() if why == reason and Path(one).match(kind)]
        said[kind if len(alike) == kinds.count(kind) > 1 else name] = reason
    return [f"{name} left out: {reason}" for name, reason in said.items()]


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """Give a folder beside ``folder`` to write in; it takes the name at the end, or is removed with all in it."""
    place = folder.resolve()
    new, old = (place.with_name(f".{place.name[:200]}.{os.getpid()}.{word}") for word in ("partial", "replaced"))
    try:
        new.mkdir()
        yield new
        if place.exists():
            place.rename(old)
        new.rename(place)
    except OSError as error:
        raise InputError(f"--files {folder}: {error.strerror or error}; expected a writable folder") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
