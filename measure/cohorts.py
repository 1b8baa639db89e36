"""Cohorts of requests that are judged together: turn 1, later turns, equal uncached work, equal load.

Both sides of a pair are divided by the truth's record of a request. So a cell holds the same requests on each side, and
a cache that behaves differently changes the times in a cell, not its requests. The load is each side's own: a request
alone in one run may share the engine in the other, and a cell of requests that were alone in the truth would charge the
other side with its ordinary variation.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from measure.runs import UNKNOWN, Run
from tracefile.records.arrays import BoolArray, FloatArray, IntArray

ALL: Final = "all"
FIRST_TURN: Final = "turn1"
LATER_TURNS: Final = "turns2+"
MAIN: Final = (ALL, FIRST_TURN, LATER_TURNS)

UNCACHED_EDGES: Final = (0, 256, 1_024, 4_096, 16_384)
"""Lower edges of the buckets of prompt tokens that the cache did not hold; the last is open."""
LOAD_EDGES: Final = (1, 2, 4, 8, 16, 32)
"""Lower edges of the buckets of requests in flight at arrival; the last is open."""


def cohort_title(name: str) -> str:
    """Return the cohort's name as a reader would say it."""
    if name in MAIN:
        return {ALL: "All requests", FIRST_TURN: "Turn 1", LATER_TURNS: "Turns 2+"}[name]
    kind, _, span = name.partition(":")
    return f"{span.replace('-', '–')} {'uncached prompt tokens' if kind == 'uncached' else 'requests in flight'}"


def known_cohorts() -> list[str]:
    """Return the name of every cohort, in the order of display."""
    return [*MAIN, *UNCACHED, *bucket_names("load", LOAD_EDGES)]


def cohort_order(names: set[str]) -> list[str]:
    """Return these cohorts in the order of display."""
    return [name for name in known_cohorts() if name in names]


def bucket_names(kind: str, edges: tuple[int, ...]) -> list[str]:
    """Return the names of the cohorts between these edges."""
    spans = [f"{low}-{high - 1}" if high - 1 > low else f"{low}" for low, high in pairwise(edges)]
    return [f"{kind}:{span}" for span in [*spans, f"{edges[-1]}+"]]


UNCACHED: Final = bucket_names("uncached", UNCACHED_EDGES)
"""Names of the cohorts by uncached prompt tokens."""


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
