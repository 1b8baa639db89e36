"""Words on real vocabularies: any row of them is a token a word, in every place that a chat template has for them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.text.api_messages import chat_messages
from loadgen.text.chattemplate import Order
from loadgen.text.messages import SyntheticMessage
from loadgen.text.targettext import TargetText, TextMaker, learn_target
from loadgen.text.tokenizer import LocalTokenizer, TokenizerError
from loadgen.text.words import Words, find_words
from tests.fakes.vocabularies import write_model
from tracefile.hashing.splitmix64 import mix64

SYSTEM_CHAT: Order = ("system", "user", "assistant", "user")


@pytest.fixture(scope="module", params=["deepseek", "qwen"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalTokenizer:
    return LocalTokenizer(write_model(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def words(tokenizer: LocalTokenizer) -> Words:
    return find_words(tokenizer)


@pytest.fixture(scope="module")
def target(tokenizer: LocalTokenizer) -> TargetText:
    return learn_target(tokenizer, [SYSTEM_CHAT[:2], SYSTEM_CHAT])


@settings(max_examples=60)
@given(seed=st.integers(0, 2**64 - 1), count=st.integers(1, 300))
def test_words_are_single_tokens(tokenizer: LocalTokenizer, words: Words, seed: int, count: int) -> None:
    numbers = words.numbers(seed, count)
    assert tokenizer.encode(words.text(numbers)) == words.ids(numbers).tolist()


@settings(max_examples=40)
@given(data=st.data())
def test_conversation_is_template_plus_words(
    tokenizer: LocalTokenizer, target: TargetText, data: st.DataObject
) -> None:
    """Any messages in any lengths: their tokens after the chat template are known before anyone encodes them."""
    text_maker = TextMaker(target, tokenizer=tokenizer)
    roles = data.draw(st.lists(st.sampled_from(["user", "assistant"]), min_size=1, max_size=4))
    messages = [
        SyntheticMessage(role, data.draw(st.integers(0, 2**64 - 1)), data.draw(st.integers(1, 40)))  # type: ignore[arg-type]
        for role in ["system", *roles, "user"]
    ]
    conversation = [text_maker.sent_message(message) for message in messages]
    planned = text_maker.ids(conversation)
    assert planned is not None
    assert planned.tolist() == tokenizer.encode_chat(chat_messages(conversation))
    assert text_maker.length(conversation) == len(planned)


def test_prompts_share_only_prefix_and_template(target: TargetText) -> None:
    text_maker = TextMaker(target)
    system = text_maker.sent_message(SyntheticMessage("system", 1, 100))
    first, second = (
        text_maker.ids([system, text_maker.sent_message(SyntheticMessage("user", key, 20))]) for key in (2, 3)
    )
    assert first is not None
    assert second is not None
    gaps = target.gaps[SYSTEM_CHAT[:2]]
    shared = int(np.flatnonzero(first != second)[0])
    assert shared == len(gaps.ids[0]) + 100 + len(gaps.ids[1])


class Broken:
    """A tokenizer with one thing wrong with it."""

    name = "broken"

    def __init__(self, encode: Callable[[str], list[int]], chat: Callable[[str], str] = str) -> None:
        self.encode, self._chat = encode, chat

    def decode(self, token_ids: object) -> str:
        raise TokenizerError("it spells nothing")

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        return self.encode(self._chat(" ".join(message["content"] for message in messages)))


def by_word(text: str) -> list[int]:
    """A token for each word, one for each line's end."""
    return [mix64(hash_of(word)) % 2**31 for word in text.replace("\n", " \n ").split(" ") if word]


def hash_of(word: str) -> int:
    return int.from_bytes(word.encode().rjust(8, b"\0")[-8:], "big")


def test_tokenizer_that_merges_words_is_detected() -> None:
    """Each word alone and behind one other is one token; three in a row are not."""

    def merging(text: str) -> list[int]:
        token_ids = by_word(text)
        return token_ids if text.count(" ") < 2 or "\n" in text else token_ids[:-1]

    target = learn_target(Broken(merging), [("user",)])
    assert target.unknown == "its words change in re-tokenization"
