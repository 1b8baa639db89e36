"""The search for the hardest value that holds, against trying them all."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from sim.forecast.search import NEIGHBOURS, Scale, bisect


def recorded(verdicts: dict[float, bool]) -> tuple[Callable[[float], bool], list[float]]:
    """A predicate by table, and the values it is asked for."""
    asked: list[float] = []

    def holds(value: float) -> bool:
        asked.append(value)
        return verdicts[value]

    return holds, asked


@given(st.integers(2, 60), st.integers(0, 400), st.integers(0, 500), st.booleans())
def test_of_counts_that_only_get_harder_it_finds_the_last_that_holds(
    low: int, width: int, last: int, smallest: bool
) -> None:
    high = low + width
    values = range(low, high + 1)
    verdicts = {float(value): (value >= last if smallest else value <= last) for value in values}
    scale = Scale(*((high, low) if smallest else (low, high)), tolerance=0.0, counts=True)
    holds, asked = recorded(verdicts)
    held = [value for value in values if verdicts[value]]
    expected = None if not verdicts[scale.easy] else float(min(held) if smallest else max(held))
    assert bisect(scale, holds) == expected
    assert len(asked) == len(set(asked))
    assert set(asked) <= verdicts.keys()
    assert len(asked) <= 2 + 2 * NEIGHBOURS + 2 * (width + 1).bit_length()


@given(st.integers(2, 40), st.lists(st.booleans(), min_size=1, max_size=60))
def test_of_what_is_not_monotone_every_value_tried_on_the_easy_side_holds(low: int, wild: list[bool]) -> None:
    verdicts = {float(low + place): holds for place, holds in enumerate(wild)}
    high = low + len(wild) - 1
    for smallest in (True, False):
        scale = Scale(*((high, low) if smallest else (low, high)), tolerance=0.0, counts=True)
        holds, asked = recorded(verdicts)
        answer = bisect(scale, holds)
        if answer is None:
            assert asked == [scale.easy]
            continue
        easier = [value for value in asked if (value >= answer if smallest else value <= answer)]
        assert all(verdicts[value] for value in easier)
        harder = [value for value in asked if value not in easier]
        if answer != scale.hard:  # the next one was tried, and does not hold
            next_one = answer - 1 if smallest else answer + 1
            assert next_one in harder
            assert not verdicts[next_one]
        around = {value for value in verdicts if abs(value - answer) <= NEIGHBOURS}
        assert around <= set(asked)


@given(st.floats(0.1, 10.0), st.sampled_from([0.01, 0.05]))
def test_of_rates_it_comes_within_the_tolerance(last: float, tolerance: float) -> None:
    answer = bisect(Scale(0.1, 10.0, tolerance, counts=False), lambda rate: rate <= last)
    assert answer is not None
    assert answer <= last <= answer * (1 + 2 * tolerance)


def test_an_end_that_holds_is_the_answer_and_is_not_passed() -> None:
    asked: list[float] = []

    def holds(value: float) -> bool:
        asked.append(value)
        return True

    assert bisect(Scale(500, 100, 0.01, counts=True), holds) == 100.0
    assert sorted(asked) == [100.0, 101.0, 102.0, 500.0]


def test_a_neighbour_that_fails_moves_the_answer_to_the_safe_side() -> None:
    """18 holds and 17 does not, but neither does 19: 20 is the first from which on all tried hold."""
    holds = {value: value >= 18 and value != 19 for value in range(2, 101)}
    assert bisect(Scale(100, 2, 0.0, counts=True), lambda value: holds[int(value)]) == 20.0
