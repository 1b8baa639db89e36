"""Order of a trace's requests by arrival; a trace file is in order of their ends."""

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
    """Sort requests by arrival; equal times keep the order of the file."""
    if (np.diff(arrivals.arrival_ms) >= 0.0).all():
        return replace(arrivals, numbers=np.arange(len(arrivals)))
    return _in_order(arrivals, np.argsort(arrivals.arrival_ms, kind="stable"))


def by_session(arrivals: Arrivals) -> Arrivals:
    """Sort turns by earliest arrival: the first arrival of the session plus all think times up to the turn. A turn
    that arrived before its parent's end has no parent."""
    due_ms, depths = _due(arrivals.arrival_ms, arrivals.parents, arrivals.think_ms)
    return _in_order(arrivals, np.lexsort((depths, due_ms)))


def _in_order(arrivals: Arrivals, order: IntArray) -> Arrivals:
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.arange(len(order))
    ordered = arrivals.select(order)
    parents = np.where(ordered.parents == NOBODY, NOBODY, numbers[ordered.parents])
    return replace(ordered, numbers=np.arange(len(order)), parents=parents)


def _due(arrival_ms: FloatArray, parents: IntArray, think_ms: FloatArray) -> tuple[FloatArray, IntArray]:
    """Return the earliest arrival of each request, and its depth in the session; infinity: circular parents."""
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
    """Return ``records`` with sessions: recorded, or inferred from block hashes together with output hashes."""
    if any(record.parent_id is not None for record in records):
        return records
    if meta.block_size is None or all(record.block_hashes is None for record in records):
        raise InputError(f"{path}: --replay-sessions: no sessions and no block hashes; expected one of them")
    inference = infer_sessions(records, meta.block_size)
    print(f"{path}: sessions not recorded; inferred from block hashes", file=sys.stderr)
    inferred = infer_outputs(meta, inference.records)
    return list(map(inferred.fill, inference.records))
