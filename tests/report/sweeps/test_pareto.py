"""Pareto sets against their definition, frontiers at literal places."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from report.sweeps.pareto import XY, frontier, height_at, pareto_set

COORDINATES = st.integers(0, 6).map(float) | st.floats(-1e6, 1e6)


def undominated(points: list[XY]) -> list[bool]:
    """The definition: no other point is at least as large in both coordinates and larger in one."""
    return [not any(x >= own[0] and y >= own[1] and (x > own[0] or y > own[1]) for x, y in points) for own in points]


@settings(max_examples=60)
@given(st.lists(st.tuples(COORDINATES, COORDINATES), max_size=12))
def test_the_set_is_that_of_the_definition(points: list[XY]) -> None:
    assert pareto_set(points) == undominated(points)


@settings(max_examples=60)
@given(st.lists(st.tuples(COORDINATES, COORDINATES), min_size=1, max_size=12))
def test_a_frontier_falls_and_its_height_is_reached(points: list[XY]) -> None:
    ends = frontier(points)
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(ends))
    assert height_at(ends, min(x for x, _ in points)) == max(y for _, y in points)
    assert height_at(ends, ends[-1][0]) == ends[-1][1]


@pytest.mark.parametrize(("x", "y"), [(10.0, 352.0), (25.0, 352.0), (45.0, 305.0667), (50.0, 293.3333), (50.1, None)])
def test_between_neighbours_a_frontier_is_straight(x: float, y: float | None) -> None:
    ends = frontier([(50.0, 293.3333), (25.0, 352.0), (24.0, 300.0)])
    assert height_at(ends, x) == (None if y is None else pytest.approx(y, abs=1e-3))
