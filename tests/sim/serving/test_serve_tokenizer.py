"""A real tokenizer behind the server: answers that survive re-tokenization, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from sim.serving.vocabulary import Message, TokenizerVocabulary
from tests.fakes.vocabularies import package_folder
from tracefile.records.errors import InputError


@pytest.fixture(scope="module")
def vocabulary() -> TokenizerVocabulary:
    return TokenizerVocabulary(package_folder("deepseek"))


def test_answers_survive_the_way_through_text(vocabulary: TokenizerVocabulary) -> None:
    draws = np.random.default_rng(0)
    for _ in range(50):
        answer = draws.choice(vocabulary.output_ids, 40).tolist()
        assert vocabulary.encode(vocabulary.decode(answer)) == answer


def test_an_answer_sent_back_continues_the_ids_it_was(vocabulary: TokenizerVocabulary) -> None:
    question = Message(role="user", text="why?")
    before = vocabulary.render_chat([question], [], generation_prompt=True)
    answer = vocabulary.output_ids[:20].tolist()
    turns = [question, Message(role="assistant", text=vocabulary.decode(answer)), Message(role="user", text="and?")]
    assert vocabulary.render_chat(turns, [], generation_prompt=True)[: len(before) + 20] == before + answer


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=f"--tokenizer {tmp_path}: cannot be loaded"):
        TokenizerVocabulary(tmp_path)
