"""Draws are a function of their position alone: golden values, and a slow oracle in plain integers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.arrivals import bounded_us, constant_us, poisson_us
from loadgen.config import Span
from loadgen.draws import (
    GOLDEN,
    MASK64,
    ORDINARY,
    Stream,
    Vocabulary,
    below,
    draw,
    expand_tokens,
    mix64,
    mix64_array,
    text_key,
    tokens_of,
)
from loadgen.workload import _in_span
from tracefile import InputError

U64 = st.integers(0, MASK64)


def test_mix64_is_the_published_splitmix64() -> None:
    # The generator's first outputs from state 1234567, as its author gives them.
    assert [mix64(1234567 + GOLDEN * step) for step in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_tokens_are_these_on_every_machine() -> None:
    assert tokens_of(0, 8, ORDINARY).tolist() == [88447, 43721, 3616, 97117, 11528, 33405, 18212, 77383]
    assert tokens_of(text_key("golden"), 8, Vocabulary(3, 7)).tolist() == [4, 6, 3, 6, 4, 3, 6, 5]
    assert draw(42, Stream.ARRIVAL_GAP, 0) == 14683772372732499137


@given(st.lists(U64, min_size=1, max_size=5), st.integers(0, 40), st.integers(0, 1000), st.integers(1, 1 << 20))
def test_expansion_equals_plain_integers(keys: list[int], count: int, low: int, span: int) -> None:
    expected = [
        [low + ((mix64(key + counter * GOLDEN) >> 32) * span >> 32) for counter in range(1, count + 1)] for key in keys
    ]
    made = expand_tokens(np.array(keys, dtype=np.uint64), count, Vocabulary(low, low + span))
    assert made.dtype == np.uint32
    assert made.tolist() == expected


@given(U64, st.integers(1, 1 << 32))
def test_below_stays_below(bits: int, limit: int) -> None:
    assert 0 <= below(bits, limit) < limit


@given(st.lists(U64, max_size=20))
def test_arrays_mix_as_integers_do(values: list[int]) -> None:
    assert mix64_array(np.array(values, dtype=np.uint64)).tolist() == [mix64(value) for value in values]


def test_a_span_holds_both_its_ends() -> None:
    drawn = {_in_span(draw(0, Stream.PROMPT_LENGTH, index), Span(3, 5)) for index in range(100)}
    assert drawn == {3, 4, 5}
    assert {_in_span(draw(0, Stream.THINK_TIME, index), Span(0.5, 0.5), 1000) for index in range(9)} == {500}


def test_constant_arrivals_do_not_drift() -> None:
    assert bounded_us(constant_us(3), 4, None) == [0, 333_333, 666_667, 1_000_000]
    # 5.0 s is no longer within 5 s.
    assert len(bounded_us(constant_us(3), None, 5.0)) == 15


def test_poisson_arrivals_are_these() -> None:
    assert bounded_us(poisson_us(2, seed=7), 4, None) == [21696, 417982, 996372, 1012243]


def test_poisson_gaps_have_their_mean_and_spread() -> None:
    arrivals = bounded_us(poisson_us(10, seed=1), 20_000, None)
    gaps = np.diff([0, *arrivals])
    # Exponential: mean and deviation are equal; the standard error of both is under 1 % here.
    assert gaps.mean() == pytest.approx(100_000, rel=0.03)
    assert gaps.std() == pytest.approx(100_000, rel=0.03)


def test_a_vocabulary_has_ids() -> None:
    with pytest.raises(InputError, match="--vocab-low, --vocab-high: 5 and 5"):
        Vocabulary(5, 5)
