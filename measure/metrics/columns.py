"""Columns of a run for other tools: a row per request or session, with all its latency and token metrics."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from measure.metrics.client import lag_ms_of
from measure.metrics.requests import PER_GAP, REQUEST_METRICS
from measure.metrics.sessions import SESSION_METRICS, measure_sessions, session_order
from measure.runs import STATUSES, UNKNOWN, Run
from tracefile.records.arrays import BoolArray, FloatArray, IntArray

PART_ROWS: Final = 1 << 14
"""Rows converted to Python objects at a time."""


@dataclass(frozen=True, slots=True)
class Lists:
    """Column with a list per row."""

    values: FloatArray
    starts: IntArray
    """Index of each row's first value, and the end."""

    def __len__(self) -> int:
        return len(self.starts) - 1


Column = list[str] | list[str | None] | FloatArray | IntArray | BoolArray | Lists
"""Strings, or an array with NaN or UNKNOWN for null."""
Table = Mapping[str, Column]


def request_table(run: Run) -> Table:
    """Return the columns of the requests, in file order: latencies, tokens; ITL is a list per request."""
    counts = {"input_tokens": run.prompt_tokens, "output_tokens": run.output_tokens, "turns": run.turn}
    starts = np.searchsorted(run.gap_owner, np.arange(len(run) + 1))
    metrics = {
        name: Lists(values(run), starts) if name in PER_GAP else counts.get(name, values(run))
        for name, values in REQUEST_METRICS.items()
    }
    return {
        "request_id": run.request_ids,
        "session_id": run.sessions,
        "parent_id": run.parents,
        "status": [STATUSES[number] for number in run.status],
        "arrival_ms": run.arrival_ms,
        "scheduled_ms": run.scheduled_ms,
        "lag_ms": lag_ms_of(run),
        "held": run.held,
        "streamed": run.streamed,
        "cached_tokens": run.cached_tokens,
        "reusable_tokens": run.reusable_tokens,
        "planned_prompt_tokens": run.planned_prompt_tokens,
        "max_tokens": run.max_tokens,
        "concurrency": run.concurrency,
        **metrics,
    }


def session_table(run: Run) -> Table:
    """Return the columns of the sessions, by first row; a request without a session is a session with its id."""
    order, sessions = session_order(run), measure_sessions(run)
    firsts = order.rows[order.starts]
    return {
        "session_id": [run.sessions[row] or run.request_ids[row] for row in firsts],
        "completed": sessions.completed,
        "arrival_ms": run.arrival_ms[firsts],
        **{name: getattr(sessions, name) for name in SESSION_METRICS if name != "requests"},
        "requests": sessions.requests.astype(np.int64),
    }


def parts(table: Table) -> Iterator[dict[str, list[Any]]]:
    """Yield batches of rows as lists by column; null is None."""
    rows = len(next(iter(table.values())))
    for start in range(0, rows, PART_ROWS):
        stop = min(start + PART_ROWS, rows)
        yield {name: _values(column, start, stop) for name, column in table.items()}


def _values(column: Column, start: int, stop: int) -> list[Any]:
    if isinstance(column, list):
        return list(column[start:stop])
    if isinstance(column, Lists):
        bounds = column.starts[start : stop + 1].tolist()
        return [column.values[begin:end].tolist() for begin, end in pairwise(bounds)]
    rows = column[start:stop]
    values: list[Any] = rows.tolist()
    if rows.dtype != np.bool_:
        null = np.isnan(rows) if rows.dtype.kind == "f" else rows == UNKNOWN
        for row in np.flatnonzero(null).tolist():
            values[row] = None
    return values
