"""A folder of files: tables of requests and sessions, and a timeline.

It is written beside its place and renamed: whole or not at all, and over nothing but its own like. In the timeline,
for Perfetto and Chrome, each session and request takes the first track that is free when it begins.
"""

import csv
import heapq
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np

from measure.metrics.columns import Column, Lists, Table, parts, request_table, session_table
from measure.metrics.sessions import session_order
from measure.runs import STATUSES, UNKNOWN, Run
from report.files.measured import Measured
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.errors import InputError
from tracefile.records.extras import lacking

SESSIONS: Final = 1
REQUESTS: Final = 2
"""Process ids of the groups of tracks."""


class Lacking(Exception):  # noqa: N818 - no error: the file is left out
    """Raised with what a file needs and the trace lacks."""


Writer = Callable[[Measured, Path], None]
"""Writes one file; raises Lacking before its first byte or behind it."""


def tracks(begins: FloatArray, ends: FloatArray) -> IntArray:
    """Return the track, from 0, of each span: the lowest that is free."""
    found = np.zeros(len(begins), np.int64)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    for place in np.argsort(begins, kind="stable").tolist():
        while busy and busy[0][0] <= begins[place]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        track = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (float(ends[place]), track))
        found[place] = track
    return found


def _slice(name: str, process: int, track: int, span_ms: tuple[float, float], **told: Any) -> dict[str, Any]:
    begin_ms, end_ms = span_ms
    known = {key: value for key, value in told.items() if value is not None and value != UNKNOWN}
    event = {"name": name, "ph": "X", "pid": process, "tid": track + 1}
    return event | {"ts": round(begin_ms * 1000, 3), "dur": round((end_ms - begin_ms) * 1000, 3), "args": known}


def events(run: Run) -> Iterator[dict[str, Any]]:
    """Return names of the two groups, then sessions, then requests with their prefill and decode inside."""
    kept = run.select(np.flatnonzero(~np.isnan(run.end_ms)))
    if not len(kept):
        raise Lacking("no request has its times (arrival_ms, e2e_ms)")
    for process, name in ((SESSIONS, "sessions"), (REQUESTS, "requests")):
        yield _process(process, name)
    yield from _sessions(kept)
    yield from _requests(kept)


def _sessions(run: Run) -> Iterator[dict[str, Any]]:
    order = session_order(run)
    firsts = order.rows[order.starts]
    begins_ms, ends_ms = run.arrival_ms[firsts], np.maximum.reduceat(run.end_ms[order.rows], order.starts)
    counts = np.diff(np.append(order.starts, len(order.rows))).tolist()
    for place, track in enumerate(tracks(begins_ms, ends_ms).tolist()):
        row = firsts[place]
        span_ms = float(begins_ms[place]), float(ends_ms[place])
        yield _slice(run.sessions[row] or run.request_ids[row], SESSIONS, track, span_ms, requests=counts[place])


def _requests(run: Run) -> Iterator[dict[str, Any]]:
    for row, track in enumerate(tracks(run.arrival_ms, run.end_ms).tolist()):
        begin_ms, end_ms, ttft_ms = (float(one[row]) for one in (run.arrival_ms, run.end_ms, run.ttft_ms))
        yield _slice(
            run.request_ids[row],
            REQUESTS,
            track,
            (begin_ms, end_ms),
            session=run.sessions[row],
            turn=int(run.turn[row]),
            status=STATUSES[run.status[row]],
            prompt_tokens=int(run.prompt_tokens[row]),
            cached_tokens=int(run.cached_tokens[row]),
            output_tokens=int(run.output_tokens[row]),
        )
        first_ms = min(begin_ms + ttft_ms, end_ms)
        if first_ms >= begin_ms:  # not NaN
            yield _slice("to first token", REQUESTS, track, (begin_ms, first_ms))
            yield _slice("decode", REQUESTS, track, (first_ms, end_ms))


def _process(process: int, name: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}


def _write_timeline(measured: Measured, path: Path) -> None:
    with open(path, "wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        for number, event in enumerate(events(measured.run)):
            file.write((b",\n" if number else b"\n") + msgspec.json.encode(event))
        file.write(b"\n]}\n")


def _write_jsonl(table: Table, path: Path) -> None:
    encoder = msgspec.json.Encoder()
    with open(path, "wb") as file:
        for part in parts(table):
            rows = zip(*part.values(), strict=True)
            file.write(encoder.encode_lines([dict(zip(part, row, strict=True)) for row in rows]))


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


def _of(table_of: Callable[[Run], Table], write: Callable[[Table, Path], None]) -> Writer:
    return lambda measured, path: write(table_of(measured.run), path)


FILES: Final[dict[str, Writer]] = {
    **{
        f"{name}.{suffix}": _of(table_of, write)
        for name, table_of in (("requests", request_table), ("sessions", session_table))
        for suffix, write in (("parquet", write_parquet), ("csv", _write_csv), ("jsonl", _write_jsonl))
    },
    "timeline.json": _write_timeline,
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
    """Write every file that the trace has the facts for; return a line for each of the others."""
    left_out = []
    with _whole(folder) as new:
        for name, write in FILES.items():
            path = new / name
            try:
                write(measured, path)
            except Lacking as error:
                path.unlink(missing_ok=True)
                left_out.append(f"{name} left out: {error}")
    return left_out


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
