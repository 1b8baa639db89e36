"""A trace as columns: an array for each field that a metric reads, in file order."""

from array import array
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tracefile.files.digest import trace_digest
from tracefile.files.reading import open_trace
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record, Status

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
        """Only the requests at ``rows``, in that order."""
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


@dataclass(slots=True)
class _Columns:
    """Columns under construction, so that records need not be kept."""

    request_ids: list[str] = field(default_factory=list)
    sessions: list[str | None] = field(default_factory=list)
    turn: "array[int]" = field(default_factory=lambda: array("q"))
    arrival_ms: "array[float]" = field(default_factory=lambda: array("d"))
    scheduled_ms: "array[float]" = field(default_factory=lambda: array("d"))
    ttft_ms: "array[float]" = field(default_factory=lambda: array("d"))
    e2e_ms: "array[float]" = field(default_factory=lambda: array("d"))
    status: "array[int]" = field(default_factory=lambda: array("b"))
    streamed: "array[int]" = field(default_factory=lambda: array("b"))
    prompt_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    cached_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    concurrency: "array[int]" = field(default_factory=lambda: array("q"))
    itl_ms: "array[float]" = field(default_factory=lambda: array("d"))
    itl_reads: "array[int]" = field(default_factory=lambda: array("q"))
    tpot_ms: "array[float]" = field(default_factory=lambda: array("d"))

    def append(self, record: Record) -> None:
        self.request_ids.append(record.request_id)
        self.sessions.append(record.session_id)
        self.turn.append(_count(record.turn))
        self.arrival_ms.append(_time(record.arrival_ms))
        self.scheduled_ms.append(_time(record.scheduled_ms))
        self.ttft_ms.append(_time(record.ttft_ms))
        self.e2e_ms.append(_time(record.e2e_ms))
        self.status.append(STATUSES.index(record.status))
        self.streamed.append(record.stream is not False)
        self.prompt_tokens.append(_count(record.prompt_tokens))
        self.cached_tokens.append(_count(record.cached_tokens))
        self.concurrency.append(_count(record.concurrency))
        self.itl_ms.extend(record.itl_ms)
        self.itl_reads.append(len(record.itl_ms))
        self.tpot_ms.append(_tpot_ms(record))


def load_run(label: str, path: Path) -> Run:
    """Read a trace into columns; InputError if it is missing, malformed or empty."""
    columns = _Columns()
    with open_trace(path) as reader:
        for record in reader:
            columns.append(record)
        meta, warnings = reader.meta, tuple(reader.warnings)
    if not columns.request_ids:
        raise InputError(f"{path}: no records; expected at least one request to compare")
    return Run(
        label=label,
        file=path.name,
        digest=trace_digest(path),
        meta=meta,
        request_ids=columns.request_ids,
        sessions=columns.sessions,
        turn=np.array(columns.turn, dtype=np.int64),
        arrival_ms=np.array(columns.arrival_ms),
        scheduled_ms=np.array(columns.scheduled_ms),
        ttft_ms=np.array(columns.ttft_ms),
        e2e_ms=np.array(columns.e2e_ms),
        status=np.array(columns.status, dtype=np.int8),
        streamed=np.array(columns.streamed, dtype=np.bool_),
        prompt_tokens=np.array(columns.prompt_tokens, dtype=np.int64),
        cached_tokens=np.array(columns.cached_tokens, dtype=np.int64),
        concurrency=np.array(columns.concurrency, dtype=np.int64),
        itl_ms=np.array(columns.itl_ms),
        itl_owner=np.repeat(np.arange(len(columns.itl_reads)), np.array(columns.itl_reads, dtype=np.int64)),
        tpot_ms=np.array(columns.tpot_ms),
        warnings=warnings,
    )


def _count(value: int | None) -> int:
    return UNKNOWN if value is None else value


def _time(value: float | None) -> float:
    return float("nan") if value is None else value


def _tpot_ms(record: Record) -> float:
    later_tokens = sum(record.itl_tokens) or (record.output_tokens or 0) - 1
    if not record.itl_ms or later_tokens < 1:
        return float("nan")
    return sum(record.itl_ms) / later_tokens
