"""Cohorts of requests that are judged together: turn 1, later turns, equal uncached work, equal load.

Both sides of a pair are divided by the truth's record of a request. So a cell holds the same requests on each side, and
a cache that behaves differently changes the times in a cell, not its requests. The load is each side's own: a request
alone in one run may share the engine in the other, and a cell of requests that were alone in the truth would charge the
other side with its ordinary variation.
"""

from itertools import pairwise
from typing import Final

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
