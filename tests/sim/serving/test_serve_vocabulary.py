"""The built-in vocabulary: text and output ids round-trip."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.serving.output import OutputLimits, draw_output
from sim.serving.vocabulary import Vocabulary

VOCABULARY = Vocabulary()
PROMPT = np.arange(40, dtype="<u4").tobytes()


@given(st.text())
def test_text_round_trips(text: str) -> None:
    token_ids = VOCABULARY.encode(text)
    assert VOCABULARY.decode(token_ids) == text
    assert all(0 <= token_id < VOCABULARY.size for token_id in token_ids)


@given(st.lists(st.sampled_from(VOCABULARY.output_ids.tolist()), max_size=40))
def test_output_ids_survive_text(token_ids: list[int]) -> None:
    assert VOCABULARY.encode(VOCABULARY.decode(token_ids)) == token_ids


def test_output_is_a_function_of_prompt_seed_and_choice() -> None:
    limits = OutputLimits(max_tokens=30, ignore_eos=True)
    first = draw_output(PROMPT, VOCABULARY, limits, seed=1, choice=0)
    assert first == draw_output(PROMPT, VOCABULARY, limits, seed=1, choice=0)
    variants = [
        draw_output(PROMPT + PROMPT, VOCABULARY, limits, seed=1, choice=0),
        draw_output(PROMPT, VOCABULARY, limits, seed=2, choice=0),
        draw_output(PROMPT, VOCABULARY, limits, seed=1, choice=1),
    ]
    assert len({tuple(output.token_ids) for output in (first, *variants)}) == 4
    # A shorter limit gives the beginning of the same output.
    shorter = draw_output(PROMPT, VOCABULARY, OutputLimits(max_tokens=10, ignore_eos=True), seed=1, choice=0)
    assert shorter.token_ids == first.token_ids[:10]


@pytest.mark.parametrize("seed", range(20))
def test_free_output_ends_within_limits(seed: int) -> None:
    limits = OutputLimits(max_tokens=60, min_tokens=20, median_tokens=40.0)
    output = draw_output(PROMPT, VOCABULARY, limits, seed=seed, choice=0)
    ended = output.token_ids[-1] == VOCABULARY.end_id
    assert ended == (output.finish_reason == "stop")
    assert VOCABULARY.end_id not in output.token_ids[:-1]
    # The end token follows at least min_tokens tokens.
    assert 20 < len(output.token_ids) <= 60
    assert ended or len(output.token_ids) == 60
