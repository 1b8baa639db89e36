"""Draws are a function of their position alone: golden values, and a slow oracle in plain integers."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loadgen.core.bodies import encode_ids
from loadgen.core.draws import Stream, below, draw, draw_array, expand_tokens, text_key, tokens_of
from loadgen.core.vocabulary import ORDINARY, Vocabulary
from tracefile.hashing.splitmix64 import GOLDEN, MASK64, mix64, mix64_array

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


@given(st.lists(st.integers(0, 1_100_000), max_size=40))
def test_ids_are_a_json_array(ids: list[int]) -> None:
    assert json.loads(encode_ids(np.array(ids, dtype=np.uint32))) == ids


@given(U64, st.integers(1, 1 << 32))
def test_below_stays_below(bits: int, limit: int) -> None:
    assert 0 <= below(bits, limit) < limit


@given(st.lists(U64, max_size=20))
def test_array_mix_equals_integer_mix(values: list[int]) -> None:
    assert mix64_array(np.array(values, dtype=np.uint64)).tolist() == [mix64(value) for value in values]


@given(st.integers(0, 1 << 32), st.lists(st.integers(0, 1 << 20), min_size=1, max_size=5), st.integers(0, 1 << 20))
def test_array_draws_equal_single_draws(seed: int, firsts: list[int], second: int) -> None:
    at = np.array(firsts, dtype=np.uint64)[:, np.newaxis]
    drawn = draw_array(seed, Stream.PROMPT_LENGTH, at, np.array([second, 0], dtype=np.uint64))
    assert drawn.tolist() == [
        [draw(seed, Stream.PROMPT_LENGTH, first, second), draw(seed, Stream.PROMPT_LENGTH, first, 0)]
        for first in firsts
    ]
