"""Worth of a request's blocks by the return of requests of its kind: ``--evict workload``.

A request returns when a later one has its deepest known block too, as the next turn of a session has. Its kind is its
turn and its context length; a tool's latency is in the time until the return. Kinds that return sooner and more often
are worth more. The statistics are those of the whole trace (sim run: of each part of 32,768 requests), so that a live
engine would have to learn them first.
"""

import numpy as np

from sim.vllm.eviction import LEVELS, WORKLOAD
from tracefile.records.arrays import FloatArray, IntArray, UInt64Array

MOST_TURNS = 8
"""Later turns are of one kind."""


def return_worths(
    keys: UInt64Array, first_key: IntArray, known: IntArray, num_blocks: IntArray, arrival_ms: FloatArray
) -> IntArray:
    """Return the worth of each request's blocks, 0 to 15: the share of requests whose kind returns no faster."""
    turns, gaps_ms = _returns(keys, first_key, known, arrival_ms)
    lengths = np.frexp(np.maximum(num_blocks, 1))[1]
    kinds = np.unique(np.minimum(turns, MOST_TURNS) * 64 + lengths, return_inverse=True)[1]
    came = ~np.isnan(gaps_ms)
    requests, returns = np.bincount(kinds), np.bincount(kinds, came)
    waits_ms = np.bincount(kinds, np.nan_to_num(gaps_ms)) + float(gaps_ms[came].mean() if came.any() else 1.0)
    rates = (returns + 1) / (requests + 2) * (returns + 1) / np.maximum(waits_ms, 1e-9)
    order = np.argsort(rates, kind="stable")
    share = np.empty(len(rates))
    share[order] = np.cumsum(requests[order]) / max(len(kinds), 1)
    return np.asarray(np.minimum(share[kinds] * LEVELS[WORKLOAD], LEVELS[WORKLOAD] - 1).astype(np.int64))


def _returns(
    keys: UInt64Array, first_key: IntArray, known: IntArray, arrival_ms: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Return each request's turn, and the time until it returned, NaN if it never did."""
    turns, gaps_ms = np.ones(len(known), np.int64), np.full(len(known), np.nan)
    ended_by: dict[int, int] = {}
    for number, (first, count) in enumerate(zip(first_key.tolist(), known.tolist(), strict=True)):
        chain = keys[first : first + count].tolist()
        before = next((ended_by[key] for key in reversed(chain) if key in ended_by), None)
        if before is not None:
            turns[number] = turns[before] + 1
            if np.isnan(gaps_ms[before]):
                gaps_ms[before] = arrival_ms[number] - arrival_ms[before]
        if chain:
            ended_by[chain[-1]] = number
    return turns, gaps_ms
