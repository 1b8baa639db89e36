"""Cohorts: groups of requests with their own latency statistics, by turn, uncached prompt tokens (prefill) and load.

Both runs of a comparison are split by the reference run's record of a request. So a cell has the same requests in both
runs, and a prefix cache that behaves differently changes the latencies of a cell, not its requests. The load is from
each run: a request alone in one run may share the engine in the other, and a cell of requests that were alone in the
reference would count the other run's ordinary variation as error.
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
"""Lower edges of the buckets of uncached prompt tokens; the last bucket is open."""
LOAD_EDGES: Final = (1, 2, 4, 8, 16, 32)
"""Lower edges of the buckets of requests in flight at arrival; the last bucket is open."""


def cohort_title(name: str) -> str:
    """Return the title of a cohort, such as ``257–1024 uncached prompt tokens``."""
    if name in MAIN:
        return {ALL: "All requests", FIRST_TURN: "Turn 1", LATER_TURNS: "Turns 2+"}[name]
    kind, _, span = name.partition(":")
    return f"{span.replace('-', '–')} {'uncached prompt tokens' if kind == 'uncached' else 'requests in flight'}"


def all_cohorts() -> list[str]:
    """Return the names of all cohorts, in display order."""
    return [*MAIN, *UNCACHED, *bucket_names("load", LOAD_EDGES)]


def cohort_order(names: set[str]) -> list[str]:
    """Return the cohorts ``names`` in display order."""
    return [name for name in all_cohorts() if name in names]


def bucket_names(kind: str, edges: tuple[int, ...]) -> list[str]:
    """Return the names of the cohorts between ``edges``."""
    spans = [f"{low}-{high - 1}" if high - 1 > low else f"{low}" for low, high in pairwise(edges)]
    return [f"{kind}:{span}" for span in [*spans, f"{edges[-1]}+"]]


UNCACHED: Final = bucket_names("uncached", UNCACHED_EDGES)
"""Names of the cohorts by uncached prompt tokens."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Values that define the cohorts: turn, uncached prompt tokens, load; UNKNOWN: not recorded."""

    turn: IntArray
    uncached_tokens: IntArray
    concurrency: IntArray


def recorded_traits(run: Run) -> Traits:
    """Return the traits that the run recorded: turn, uncached prompt tokens, load."""
    is_reported = (run.prompt_tokens != UNKNOWN) & (run.cached_tokens != UNKNOWN)
    uncached = np.where(is_reported, run.prompt_tokens - run.cached_tokens, UNKNOWN)
    return Traits(run.turn, np.where(is_reported, np.maximum(uncached, 0), UNKNOWN), run.concurrency)


def borrowed_traits(traits: Traits, truth: Traits, rows: IntArray, truth_rows: IntArray) -> Traits:
    """Return the traits with turn and uncached prompt tokens of the reference run, where it has them."""

    def borrow(mine: IntArray, theirs: IntArray) -> IntArray:
        result = mine.copy()
        has_value = theirs[truth_rows] != UNKNOWN
        result[rows[has_value]] = theirs[truth_rows[has_value]]
        return result

    uncached = borrow(traits.uncached_tokens, truth.uncached_tokens)
    return Traits(borrow(traits.turn, truth.turn), uncached, traits.concurrency)


def cohort_rows(traits: Traits) -> dict[str, IntArray]:
    """Return the rows of each non-empty cohort, in display order."""
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
