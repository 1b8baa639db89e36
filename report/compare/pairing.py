"""Which request of one run is which of another, and which run is the truth of which."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from measure.runs import Run
from tracefile.records.arrays import IntArray
from tracefile.records.errors import InputError


@dataclass(frozen=True, slots=True)
class Join:
    """The requests that two runs share, by ``request_id``: row i of each side is the same request."""

    truth_rows: IntArray
    other_rows: IntArray
    unmatched_truth: int
    unmatched_other: int

    def __len__(self) -> int:
        return len(self.truth_rows)


def join_runs(truth: Run, other: Run) -> Join:
    """Match by ``request_id``; an id that occurs twice in a trace is matched once, by its first record."""
    first: dict[str, int] = {}
    for row, request_id in enumerate(truth.request_ids):
        first.setdefault(request_id, row)
    truth_rows: list[int] = []
    other_rows: list[int] = []
    for row, request_id in enumerate(other.request_ids):
        found = first.pop(request_id, None)
        if found is not None:
            truth_rows.append(found)
            other_rows.append(row)
    return Join(
        np.array(truth_rows, dtype=np.int64),
        np.array(other_rows, dtype=np.int64),
        len(truth) - len(truth_rows),
        len(other) - len(other_rows),
    )


def resolve_truths(labels: Sequence[str], named: Mapping[str, str]) -> dict[str, str]:
    """Each compared label's truth: the first label, unless named otherwise; one named after itself has none.

    Truths come before what is judged by them in the result, so that one pass over it suffices. InputError for an
    unknown label or a circle.
    """
    for label, truth in named.items():
        for name in (label, truth):
            if name not in labels:
                raise InputError(
                    f"--truth {label}={truth}: no trace is labelled {name!r}; there are {', '.join(labels)}"
                )
    truths = {label: named.get(label, labels[0]) for label in labels}
    ordered: dict[str, str] = {}
    for label in labels:
        for step in reversed(_chain(label, truths)):
            if truths[step] != step:
                ordered.setdefault(step, truths[step])
    return ordered


def _chain(label: str, truths: Mapping[str, str]) -> list[str]:
    """The label, its truth, that one's truth … up to one that stands for itself."""
    chain = [label]
    while truths[chain[-1]] != chain[-1]:
        if truths[chain[-1]] in chain:
            raise InputError(f"--truth {chain[-1]}={truths[chain[-1]]}: truths in a circle; one label must stand alone")
        chain.append(truths[chain[-1]])
    return chain
