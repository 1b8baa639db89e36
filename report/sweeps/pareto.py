"""Pareto set of points, and the frontier through it."""

from collections.abc import Sequence

import numpy as np

XY = tuple[float, float]


def pareto_set(points: Sequence[XY]) -> list[bool]:
    """Return for each point if no other is at least as large in both coordinates and larger in one."""
    found = [False] * len(points)
    highest = float("-inf")
    last: XY | None = None
    for place in sorted(range(len(points)), key=lambda place: points[place], reverse=True):
        if points[place][1] > highest or points[place] == last:
            found[place] = True
            highest, last = points[place][1], points[place]
    return found


def frontier(points: Sequence[XY]) -> list[XY]:
    """Return the Pareto set by rising x, and so by falling y."""
    return sorted({point for point, kept in zip(points, pareto_set(points), strict=True) if kept})


def height_at(ends: Sequence[XY], x: float) -> float | None:
    """Return the largest y at this x or beyond: straight between neighbours of the frontier. Null: x is beyond it."""
    if not ends or x > ends[-1][0]:
        return None
    return float(np.interp(x, [one for one, _ in ends], [other for _, other in ends]))
