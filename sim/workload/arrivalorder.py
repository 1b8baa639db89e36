"""Requests of a trace in the order in which they can arrive; files have them in the order of their ends.

The order comes from the trace's times and parents alone. A second reading holds each request back until all before it
have been read: memory follows the requests in flight, apart from some numbers per request.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sim.workload.arrivals import NOBODY, Arrivals, parents_of, require_times
from tracefile.outputs import infer_outputs
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.batches import Batch
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record
from tracefile.sessions import infer_sessions

PART = 1 << 15


class Order(NamedTuple):
    """Order of arrival, by place in the file; numbers are places in the new order."""

    numbers: IntArray
    due_ms: FloatArray
    """Earliest time at which it can arrive, by number, never falling."""
    parents: IntArray
    """Number of the request whose end it waits for; NOBODY: none."""
    last_children: IntArray
    """Number of the last request that waits for its end; NOBODY: none."""
    think_ms: FloatArray
    """From its parent's end to its arrival; NaN: it waits for none."""


class Part(NamedTuple):
    """Requests that come next."""

    arrivals: Arrivals
    until_ms: float
    """Earliest time of the arrivals after them; infinity: there are none."""


def by_arrival(times_ms: FloatArray) -> Order:
    """Order arrivals by time; equal times keep the order of the file."""
    nobody = np.full(len(times_ms), NOBODY)
    return _ordered(times_ms, np.zeros(len(times_ms), np.int64), nobody, np.full(len(times_ms), np.nan))


def by_session(batches: Iterable[Batch], path: Path) -> Order:
    """Order turns by think time after their parent's end: the earliest time is the session's first arrival plus all
    think times since. A turn that came before its parent's end has no parent."""
    ids: list[str | None] = []
    parent_ids: list[str | None] = []
    times: list[tuple[FloatArray, FloatArray, FloatArray]] = [(np.empty(0), np.empty(0), np.empty(0))]
    for batch in batches:
        ids += batch.words("request_id")
        parent_ids += batch.words("parent_id")
        times.append((batch.times("arrival_ms"), batch.times("e2e_ms"), batch.times("think_ms")))
    arrival_ms, e2e_ms, think_ms = (np.concatenate(columns) for columns in zip(*times, strict=True))
    require_times(path, ids, arrival_ms)
    parents, think_ms = parents_of([name or "" for name in ids], parent_ids, arrival_ms, e2e_ms, think_ms)
    return _ordered(*_due(arrival_ms, parents, think_ms), parents, think_ms)


def _due(arrival_ms: FloatArray, parents: IntArray, think_ms: FloatArray) -> tuple[FloatArray, IntArray]:
    """Earliest arrival and depth of each request in its line; infinity: the line is a circle."""
    due_ms = np.where(parents == NOBODY, arrival_ms, np.inf)
    depths = np.zeros(len(parents), np.int64)
    waiting, depth = np.flatnonzero(parents != NOBODY), 0
    while len(waiting):
        depth += 1
        is_next = due_ms[parents[waiting]] < np.inf
        if not is_next.any():
            break
        some = waiting[is_next]
        due_ms[some], depths[some] = due_ms[parents[some]] + think_ms[some], depth
        waiting = waiting[~is_next]
    return due_ms, depths


def _ordered(due_ms: FloatArray, depths: IntArray, parents: IntArray, think_ms: FloatArray) -> Order:
    order = np.lexsort((depths, due_ms))
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.arange(len(order))
    waits = parents != NOBODY
    numbered, last = np.where(waits, numbers[parents], NOBODY), np.full(len(order), NOBODY)
    np.maximum.at(last, parents[waits], numbers[waits])
    return Order(numbers, due_ms[order], numbered, last, think_ms)


def in_parts(batches: Iterable[Arrivals], order: Order) -> Iterator[Part]:
    """The arrivals of ``batches`` in ``order``, about ``PART`` at a time."""
    to_come = np.append(np.minimum.accumulate(order.numbers[::-1])[::-1], len(order.numbers))
    due_ms = np.append(order.due_ms, np.inf)
    some: list[Arrivals] = []
    read = held = handed_over = 0
    for batch in chain(batches, [None]):
        if batch is not None:
            some.append(_placed(batch, order, read))
            read += len(batch)
            # Half as many as are held back, so that putting them in order costs each request but a few moves.
            if sum(map(len, some)) < held + max(PART, held // 2):
                continue
        if not some:
            return
        waiting = some[0].followed_by(*some[1:])
        places = np.argsort(waiting.numbers)
        ready = int(np.searchsorted(waiting.numbers[places], to_come[read]))
        part, some = waiting.take(places[:ready]), [waiting.take(places[ready:])]
        held = len(waiting) - ready
        handed_over += ready
        if ready:
            yield Part(part, float(due_ms[handed_over]))


def _placed(batch: Arrivals, order: Order, first: int) -> Arrivals:
    here = slice(first, first + len(batch))
    return replace(
        batch,
        numbers=order.numbers[here],
        parents=order.parents[here],
        last_children=order.last_children[here],
        think_ms=order.think_ms[here],
    )


def linked_records(meta: Meta, records: list[Record], path: Path) -> list[Record]:
    """Return ``records`` with their sessions: as recorded, else inferred from block hashes, the outputs' with them."""
    if any(record.parent_id is not None for record in records):
        return records
    if meta.block_size is None or all(record.block_hashes is None for record in records):
        raise InputError(f"{path}: --replay-sessions: no sessions and no block hashes to infer them from")
    inference = infer_sessions(records, meta.block_size)
    print(f"{path}: no sessions recorded; inferred from block hashes", file=sys.stderr)
    inferred = infer_outputs(meta, inference.records)
    return list(map(inferred.fill, inference.records))
