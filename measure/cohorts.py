"""Which requests are judged together: turn 1, later turns, like work, like load.

Both sides of a pair are cut by the truth's record of a request, so that a cell holds the same requests on each side
and a cache that behaves differently moves the times in a cell, not the requests between cells. Load is each side's
own: who met nobody in one run may meet somebody in the other, and a cell of those who were lucky in the truth would
hold the ordinary luck of the other side against it.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from measure.runs import UNKNOWN, Run
from tracefile.records.arrays import FloatArray, IntArray

ALL: Final = "all"
FIRST_TURN: Final = "turn1"
LATER_TURNS: Final = "turns2+"
MAIN: Final = (ALL, FIRST_TURN, LATER_TURNS)

UNCACHED_EDGES: Final = (0, 256, 1_024, 4_096, 16_384)
"""Lower edges of the buckets of prompt tokens that the cache did not hold; the last is open."""
LOAD_EDGES: Final = (1, 2, 4, 8, 16, 32)
"""Lower edges of the buckets of requests in flight at arrival; the last is open."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What decides the cohorts of a run's n records; UNKNOWN where nothing tells."""

    turn: IntArray
    uncached_tokens: IntArray
    concurrency: IntArray


def own_traits(run: Run) -> Traits:
    """The traits as the run itself recorded them."""
    known = (run.prompt_tokens != UNKNOWN) & (run.cached_tokens != UNKNOWN)
    uncached = np.where(known, run.prompt_tokens - run.cached_tokens, UNKNOWN)
    return Traits(run.turn, np.where(known, np.maximum(uncached, 0), UNKNOWN), run.concurrency)


def borrowed_traits(own: Traits, truth: Traits, rows: IntArray, truth_rows: IntArray) -> Traits:
    """The traits, all but the load those of the truth wherever a record has its counterpart there that tells."""

    def borrow(mine: IntArray, theirs: IntArray) -> IntArray:
        result = mine.copy()
        known = theirs[truth_rows] != UNKNOWN
        result[rows[known]] = theirs[truth_rows[known]]
        return result

    return Traits(
        borrow(own.turn, truth.turn),
        borrow(own.uncached_tokens, truth.uncached_tokens),
        own.concurrency,
    )


def cohort_rows(traits: Traits) -> dict[str, IntArray]:
    """Row numbers of every cohort that has a record, in the order they are shown."""
    masks: dict[str, npt.NDArray[np.bool_]] = {ALL: np.ones(len(traits.turn), dtype=np.bool_)}
    masks[FIRST_TURN] = traits.turn == 1
    masks[LATER_TURNS] = traits.turn >= 2
    masks |= _buckets("uncached", traits.uncached_tokens, UNCACHED_EDGES)
    masks |= _buckets("load", traits.concurrency, LOAD_EDGES)
    return {name: np.flatnonzero(mask) for name, mask in masks.items() if mask.any()}


def cohort_title(name: str) -> str:
    """The cohort's name as a reader would say it."""
    if name in MAIN:
        return {ALL: "All requests", FIRST_TURN: "Turn 1", LATER_TURNS: "Turns 2+"}[name]
    kind, _, span = name.partition(":")
    return f"{span.replace('-', '–')} {'uncached prompt tokens' if kind == 'uncached' else 'requests in flight'}"


def known_cohorts() -> list[str]:
    """Every cohort's name, in the order they are shown."""
    return [*MAIN, *_bucket_names("uncached", UNCACHED_EDGES), *_bucket_names("load", LOAD_EDGES)]


def cohort_order(names: set[str]) -> list[str]:
    """These cohorts in the order they are shown, whichever runs they come from."""
    return [name for name in known_cohorts() if name in names]


def _buckets(kind: str, values: IntArray, edges: tuple[int, ...]) -> dict[str, npt.NDArray[np.bool_]]:
    upper: FloatArray = np.array([*edges[1:], np.inf])
    names = _bucket_names(kind, edges)
    return {name: (values >= low) & (values < high) for name, low, high in zip(names, edges, upper, strict=True)}


def _bucket_names(kind: str, edges: tuple[int, ...]) -> list[str]:
    spans = [f"{low}-{high - 1}" if high - 1 > low else f"{low}" for low, high in pairwise(edges)]
    return [f"{kind}:{span}" for span in [*spans, f"{edges[-1]}+"]]
