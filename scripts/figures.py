"""Figures of a benchmark by subject and round, as one table: medians, ratios to the peers, goals."""

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scripts.markdown import markdown_table

Rounds = Mapping[str, Mapping[str, Sequence[float]]]
"""By subject and figure: a value a round."""
_GOAL = re.compile(r"(?P<sign>[≤≥]) (?:(?P<peer>.+) (?P<operation>[×+]) )?(?P<bound>[\d.]+)")


class Figure(NamedTuple):
    """Row of the table."""

    name: str
    label: str
    form: str = ",.1f"
    goal: str = ""
    """Bound of our figure, alone or from a peer's: ``≤ 80``, ``≤ nginx × 1.3``, ``≤ nginx + 150``."""


def figure_table(figures: Sequence[Figure], rounds: Rounds, ours: str, peers: Sequence[str]) -> str:
    """Return a row for each figure that was measured: each subject's median, our ratio to each peer, the goal.

    A ratio is the median of each round's: noise that both subjects had cancels.
    """
    peers = [peer for peer in peers if peer in rounds]
    headings = ["", *rounds, *(f"{ours} / {peer}" for peer in peers), "goal", "reached"]
    rows = []
    for figure in figures:
        values = {subject: rounds[subject].get(figure.name, []) for subject in rounds}
        medians = {subject: statistics.median(found) for subject, found in values.items() if found}
        if medians:
            cells = [format(medians[subject], figure.form) if subject in medians else "" for subject in rounds]
            ratios = [_ratio(values.get(ours, []), values[peer]) for peer in peers]
            reached = _reached(figure.goal, medians, ours) if figure.goal else ""
            rows.append([figure.label, *cells, *ratios, figure.goal, reached])
    return markdown_table(headings, rows, numbers=True)


def _ratio(ours: Sequence[float], peers: Sequence[float]) -> str:
    ratios = [value / peer for value, peer in zip(ours, peers, strict=False) if peer > 0]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


def _reached(goal: str, medians: Mapping[str, float], ours: str) -> str:
    match = _GOAL.fullmatch(goal)
    assert match is not None, goal
    limit, peer = float(match["bound"]), match["peer"]
    if ours not in medians or (peer and peer not in medians):
        return "?"
    if peer:
        limit = limit * medians[peer] if match["operation"] == "×" else limit + medians[peer]
    return "yes" if (medians[ours] <= limit if match["sign"] == "≤" else medians[ours] >= limit) else "NO"
