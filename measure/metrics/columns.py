"""Columns of a run as other tools read them: a row a request, a row a session, each with every metric of it."""

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
"""Rows that are Python's own objects at a time."""


@dataclass(frozen=True, slots=True)
class Lists:
    """A list in each row."""

    values: FloatArray
    starts: IntArray
    """Place of each row's first value, and the end of the last row's."""

    def __len__(self) -> int:
        return len(self.starts) - 1


Column = list[str] | list[str | None] | FloatArray | IntArray | BoolArray | Lists
"""Words, or an array: NaN and UNKNOWN stand for null."""
Table = Mapping[str, Column]


def request_table(run: Run) -> Table:
    """Return the requests in file order; metrics with a value a gap are lists."""
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
    """Return the sessions in order of their first rows; a request without a session is one under its own id."""
    order, found = session_order(run), measure_sessions(run)
    firsts = order.rows[order.starts]
    return {
        "session_id": [run.sessions[row] or run.request_ids[row] for row in firsts],
        "completed": found.completed,
        "arrival_ms": run.arrival_ms[firsts],
        **{name: getattr(found, name) for name in SESSION_METRICS if name != "requests"},
        "requests": found.requests.astype(np.int64),
    }


def parts(table: Table) -> Iterator[dict[str, list[Any]]]:
    """Return some rows at a time as lists by column; null is None."""
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
    some = column[start:stop]
    values: list[Any] = some.tolist()
    if some.dtype != np.bool_:
        null = np.isnan(some) if some.dtype.kind == "f" else some == UNKNOWN
        for row in np.flatnonzero(null).tolist():
            values[row] = None
    return values
