"""Figures of a benchmark as a table: medians, ratios to peers, goals."""

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scripts.markdown import markdown_table

Rounds = Mapping[str, Mapping[str, Sequence[float]]]
"""Values per round, by subject and figure."""
_GOAL = re.compile(r"(?P<sign>[≤≥]) (?:(?P<peer>.+) (?P<operation>[×+]) )?(?P<bound>[\d.]+)")


class Figure(NamedTuple):
    """Row of the table."""

    name: str
    label: str
    form: str = ",.1f"
    goal: str = ""
    """Goal, absolute or relative to a peer: ``≤ 80``, ``≤ nginx × 1.3``, ``≤ nginx + 150``."""


def figure_table(figures: Sequence[Figure], rounds: Rounds, subject: str, peers: Sequence[str]) -> str:
    """Return a row per measured figure: medians of all subjects, ratios of ``subject`` to each peer, the goal.

    A ratio is the median over rounds, so noise that affects both cancels.
    """
    peers = [peer for peer in peers if peer in rounds]
    headings = ["", *rounds, *(f"{subject} / {peer}" for peer in peers), "goal", "reached"]
    rows = []
    for figure in figures:
        values = {name: rounds[name].get(figure.name, []) for name in rounds}
        medians = {name: statistics.median(samples) for name, samples in values.items() if samples}
        if medians:
            cells = [format(medians[name], figure.form) if name in medians else "" for name in rounds]
            ratios = [_ratio(values.get(subject, []), values[peer]) for peer in peers]
            reached = _reached(figure.goal, medians, subject) if figure.goal else ""
            rows.append([figure.label, *cells, *ratios, figure.goal, reached])
    return markdown_table(headings, rows, numbers=True)


def _ratio(values: Sequence[float], peers: Sequence[float]) -> str:
    ratios = [value / peer for value, peer in zip(values, peers, strict=False) if peer > 0]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


def _reached(goal: str, medians: Mapping[str, float], subject: str) -> str:
    match = _GOAL.fullmatch(goal)
    assert match is not None, goal
    limit, peer = float(match["bound"]), match["peer"]
    if subject not in medians or (peer and peer not in medians):
        return "?"
    if peer:
        limit = limit * medians[peer] if match["operation"] == "×" else limit + medians[peer]
    return "yes" if (medians[subject] <= limit if match["sign"] == "≤" else medians[subject] >= limit) else "NO"
