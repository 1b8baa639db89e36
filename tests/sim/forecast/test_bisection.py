"""The search for the last value that holds, against trying them all."""

from collections.abc import Callable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sim.forecast.search import NEIGHBOURS, bisect, values_between


def recorded(verdicts: list[bool]) -> tuple[Callable[[float], bool], list[int]]:
    """A predicate by table, and the places it is asked for."""
    asked: list[int] = []

    def holds(value: float) -> bool:
        asked.append(int(value))
        return verdicts[int(value)]

    return holds, asked


@given(st.integers(2, 400), st.integers(0, 500))
def test_of_what_only_gets_harder_it_finds_the_last_that_holds(count: int, last: int) -> None:
    holds, asked = recorded([place < last for place in range(count)])
    assert bisect([*map(float, range(count))], holds) == (min(last, count) - 1 if last else None)
    assert len(asked) == len(set(asked)) <= 2 + 2 * NEIGHBOURS + 2 * count.bit_length()


@given(st.lists(st.booleans(), min_size=2, max_size=60))
def test_of_what_is_not_monotone_every_value_tried_on_the_easy_side_holds(wild: list[bool]) -> None:
    holds, asked = recorded(wild)
    answer = bisect([*map(float, range(len(wild)))], holds)
    if answer is None:
        assert asked == [0]
        return
    assert all(wild[place] for place in asked if place <= answer)
    if answer != len(wild) - 1:  # the next one was tried, and does not hold
        assert int(answer) + 1 in asked
        assert not wild[int(answer) + 1]
    assert {place for place in range(len(wild)) if abs(place - answer) <= NEIGHBOURS} <= set(asked)


def test_values_are_a_tolerance_apart_and_have_both_ends() -> None:
    assert values_between(2.0, 6.0, 0.01, counts=True) == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert values_between(300.0, 310.0, 0.01, counts=True) == [300.0, 303.0, 306.0, 309.0, 310.0]
    rates = values_between(0.1, 10.0, 0.05, counts=False)
    assert (rates[0], rates[1], rates[-1]) == (0.1, 0.105, 10.0)
    assert all(one < other <= one * 1.0501 for one, other in pairwise(rates))


def test_a_neighbour_that_fails_moves_the_answer_to_the_safe_side() -> None:
    """18 holds and 17 does not, but neither does 19: 20 is the first from which on all tried hold."""
    holds = {value: value >= 18 and value != 19 for value in range(2, 101)}
    assert bisect([*map(float, range(100, 1, -1))], lambda value: holds[int(value)]) == 20.0
