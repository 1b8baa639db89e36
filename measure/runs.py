"""A trace as columns: an array for each field that a metric reads, in file order."""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tracefile.files.digest import trace_digest
from tracefile.files.reading import open_trace
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.errors import InputError
from tracefile.records.schema import MOST_TOKENS, Meta, Record, Status

STATUSES: Final[tuple[Status, ...]] = ("ok", "error", "client_abort", "upstream_abort", "timeout")
UNKNOWN: Final = -1
"""Missing count in integer columns; 0 is a count."""


@dataclass(frozen=True, slots=True)
class Run:
    """A labelled trace in columns of equal length n, in file order. Times in ms; NaN: null in the trace."""

    label: str
    file: str
    """File name without its folder: pages do not tell the folders of the machine."""
    digest: str
    meta: Meta
    request_ids: list[str]
    sessions: list[str | None]
    turn: IntArray
    """1, 2, …; UNKNOWN where the trace does not say."""
    arrival_ms: FloatArray
    scheduled_ms: FloatArray
    ttft_ms: FloatArray
    e2e_ms: FloatArray
    status: npt.NDArray[np.int8]
    """Index into STATUSES."""
    streamed: npt.NDArray[np.bool_]
    """False only if the trace says that the response was not streamed."""
    prompt_tokens: IntArray
    cached_tokens: IntArray
    """UNKNOWN: not reported; 0: a miss."""
    concurrency: IntArray
    itl_ms: FloatArray
    """Gaps of all requests, one after another; length Σ ``itl_reads``."""
    itl_owner: IntArray
    """Row of each gap's request."""
    tpot_ms: FloatArray
    """Σ gaps / Σ tokens after the first read, by request. NaN: one read, or none."""
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.request_ids)

    def select(self, rows: IntArray) -> "Run":
        """Return the requests at ``rows``, in that order."""
        place = np.full(len(self), UNKNOWN)
        place[rows] = np.arange(len(rows))
        gaps = place[self.itl_owner] != UNKNOWN
        columns: dict[str, Any] = {
            one.name: value[rows]
            for one in fields(self)
            if isinstance(value := getattr(self, one.name), np.ndarray) and not one.name.startswith("itl_")
        }
        return replace(
            self,
            request_ids=[self.request_ids[row] for row in rows],
            sessions=[self.sessions[row] for row in rows],
            itl_ms=self.itl_ms[gaps],
            itl_owner=place[self.itl_owner[gaps]],
            **columns,
        )


def _count(value: int | None) -> int:
    return UNKNOWN if value is None else value


def _time(value: float | None) -> float:
    return float("nan") if value is None else value


def _tpot_ms(record: Record) -> float:
    later_tokens = min(sum(record.itl_tokens), MOST_TOKENS) or (record.output_tokens or 0) - 1
    if not record.itl_ms or later_tokens < 1:
        return float("nan")
    return sum(record.itl_ms) / later_tokens


_Read = Callable[[Record], float]
_COLUMNS: Final[dict[str, tuple[str, _Read]]] = {
    "turn": ("q", lambda record: _count(record.turn)),
    "arrival_ms": ("d", lambda record: _time(record.arrival_ms)),
    "scheduled_ms": ("d", lambda record: _time(record.scheduled_ms)),
    "ttft_ms": ("d", lambda record: _time(record.ttft_ms)),
    "e2e_ms": ("d", lambda record: _time(record.e2e_ms)),
    "status": ("b", lambda record: STATUSES.index(record.status)),
    "streamed": ("b", lambda record: record.stream is not False),
    "prompt_tokens": ("q", lambda record: _count(record.prompt_tokens)),
    "cached_tokens": ("q", lambda record: _count(record.cached_tokens)),
    "concurrency": ("q", lambda record: _count(record.concurrency)),
    "tpot_ms": ("d", _tpot_ms),
}
"""Type code of each column with a value a record, and its reader."""


def load_run(label: str, path: Path) -> Run:
    """Read a trace into columns; InputError if it is missing, malformed or empty."""
    with open_trace(path) as reader:
        run = make_run(label, path.name, reader.meta, reader)
        meta, warnings = reader.meta, tuple(reader.warnings)
    if not len(run):
        raise InputError(f"{path}: no records; expected at least one request to compare")
    return replace(run, digest=trace_digest(path), meta=meta, warnings=warnings)


def make_run(label: str, file: str, meta: Meta, records: Iterable[Record]) -> Run:
    """Return records as columns, without a digest."""
    columns: dict[str, array[Any]] = {name: array(code) for name, (code, _) in _COLUMNS.items()}
    readers = [(columns[name].append, read) for name, (_, read) in _COLUMNS.items()]
    request_ids: list[str] = []
    sessions: list[str | None] = []
    itl_ms, itl_reads = array("d"), array("q")
    for record in records:
        request_ids.append(record.request_id)
        sessions.append(record.session_id)
        for append, read in readers:
            append(read(record))
        itl_ms.extend(record.itl_ms)
        itl_reads.append(len(record.itl_ms))
    found: dict[str, Any] = {name: np.array(column) for name, column in columns.items()}
    found["streamed"] = found["streamed"].astype(np.bool_)
    return Run(
        label=label,
        file=file,
        digest="",
        meta=meta,
        request_ids=request_ids,
        sessions=sessions,
        itl_ms=np.array(itl_ms),
        itl_owner=np.repeat(np.arange(len(itl_reads)), np.array(itl_reads, dtype=np.int64)),
        **found,
    )
