"""Values of requests that decide their cohorts, and the rows of each cohort."""

from dataclasses import dataclass

import numpy as np

from measure.cohorts import ALL, FIRST_TURN, LATER_TURNS, LOAD_EDGES, UNCACHED_EDGES, bucket_names
from measure.runs import UNKNOWN, Run
from tracefile.records.arrays import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Traits:
    """Values that decide the cohorts of a run's n records; UNKNOWN where the trace has none."""

    turn: IntArray
    uncached_tokens: IntArray
    concurrency: IntArray


def own_traits(run: Run) -> Traits:
    """Return the traits as the run itself recorded them."""
    known = (run.prompt_tokens != UNKNOWN) & (run.cached_tokens != UNKNOWN)
    uncached = np.where(known, run.prompt_tokens - run.cached_tokens, UNKNOWN)
    return Traits(run.turn, np.where(known, np.maximum(uncached, 0), UNKNOWN), run.concurrency)


def borrowed_traits(own: Traits, truth: Traits, rows: IntArray, truth_rows: IntArray) -> Traits:
    """Return the traits with turn and uncached tokens of the truth where the truth has the request and the value."""

    def borrow(mine: IntArray, theirs: IntArray) -> IntArray:
        result = mine.copy()
        known = theirs[truth_rows] != UNKNOWN
        result[rows[known]] = theirs[truth_rows[known]]
        return result

    return Traits(borrow(own.turn, truth.turn), borrow(own.uncached_tokens, truth.uncached_tokens), own.concurrency)


def cohort_rows(traits: Traits) -> dict[str, IntArray]:
    """Return the row numbers of each cohort that has a record, in the order of display."""
    masks: dict[str, BoolArray] = {ALL: np.ones(len(traits.turn), dtype=np.bool_)}
    masks[FIRST_TURN] = traits.turn == 1
    masks[LATER_TURNS] = traits.turn >= 2
    masks |= _buckets("uncached", traits.uncached_tokens, UNCACHED_EDGES)
    masks |= _buckets("load", traits.concurrency, LOAD_EDGES)
    return {name: np.flatnonzero(mask) for name, mask in masks.items() if mask.any()}


def _buckets(kind: str, values: IntArray, edges: tuple[int, ...]) -> dict[str, BoolArray]:
    upper: FloatArray = np.array([*edges[1:], np.inf])
    names = bucket_names(kind, edges)
    return {name: (values >= low) & (values < high) for name, low, high in zip(names, edges, upper, strict=True)}
