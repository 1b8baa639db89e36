"""Requests of a trace in order of arrival; files have them in the order of their ends."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from sim.workload.arrivals import NOBODY, Arrivals
from tracefile.outputs import infer_outputs
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record
from tracefile.sessions import infer_sessions


def by_arrival(arrivals: Arrivals) -> Arrivals:
    """Return requests by time; equal times keep the order of the file."""
    if (np.diff(arrivals.arrival_ms) >= 0.0).all():
        return replace(arrivals, numbers=np.arange(len(arrivals)))
    return _in_order(arrivals, np.argsort(arrivals.arrival_ms, kind="stable"))


def by_session(arrivals: Arrivals) -> Arrivals:
    """Return turns that wait for their parent's end, by the earliest time at which each can come: its session's first
    arrival plus all think times since. A turn that came before its parent's end has no parent."""
    due_ms, depths = _due(arrivals.arrival_ms, arrivals.parents, arrivals.think_ms)
    return _in_order(arrivals, np.lexsort((depths, due_ms)))


def _in_order(arrivals: Arrivals, order: IntArray) -> Arrivals:
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.arange(len(order))
    ordered = arrivals.take(order)
    parents = np.where(ordered.parents == NOBODY, NOBODY, numbers[ordered.parents])
    return replace(ordered, numbers=np.arange(len(order)), parents=parents)


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
        ready = waiting[is_next]
        due_ms[ready], depths[ready] = due_ms[parents[ready]] + think_ms[ready], depth
        waiting = waiting[~is_next]
    return due_ms, depths


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
