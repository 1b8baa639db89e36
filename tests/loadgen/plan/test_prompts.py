"""Prompts without a server: what each API is sent, how a session goes on, what is counted when an answer changes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from loadgen.core.job import Response
from loadgen.plan.first_prompts import ChatFirstPrompts, orders_of
from loadgen.plan.shapes import SessionShape, TurnShape
from loadgen.text.api_messages import chat_messages
from loadgen.text.prompts import ChatPrompt, Prompt, TextForm
from loadgen.text.targettext import TargetText, TextMaker, learn_target
from tracefile.hashing.blockhash import BlockHasher
from tracefile.hashing.hashkey import HashKey
from tracefile.records.schema import Record, RequestId

SESSION = SessionShape(
    index=0,
    due_ms=0.0,
    prefix=0,
    prefix_key=11,
    turns=[
        TurnShape(5, 21, 4, 0.0),
        TurnShape(6, 22, 4, 10.0),
        TurnShape(3, 23, 4, 10.0),
    ],
)
PREFIX_TOKENS = 8


class WordTokenizer:
    """A token a word, a line's end or a special token; the template is a special token before and behind a message."""

    name = "words"

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        spaced = text.replace("\n", " \n ")
        for letter in '{}":,':
            spaced = spaced.replace(letter, f" {letter} ")
        return [self._ids.setdefault(word, len(self._ids) + 300) for word in spaced.split(" ") if word]

    def decode(self, token_ids: Sequence[int]) -> str:
        words = {number: word for word, number in self._ids.items()}
        return " ".join(words.get(token_id, "?") for token_id in token_ids)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        parts = [f"<{message['role']}> {message['content']} <end>" for message in messages]
        return self.encode(" ".join([*parts, "<assistant>"]))


@pytest.fixture(scope="module")
def tokenizer() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture(scope="module")
def target(tokenizer: WordTokenizer) -> TargetText:
    return learn_target(tokenizer, orders_of([SESSION], PREFIX_TOKENS))


def answered(prompt_tokens: int | None, token_ids: list[int] | None, text: str = "", **fields: Any) -> Response:
    record = Record(
        request_id=RequestId("1"),
        status="ok",
        prompt_tokens=prompt_tokens,
        output_tokens=4,
        tokens_source="usage",
        **fields,
    )
    return Response(record, 0.0, token_ids, None, text)


def opened(target: TargetText, **form: Any) -> tuple[ChatPrompt, TextMaker]:
    text_maker = TextMaker(target)
    return ChatFirstPrompts(TextForm("chat", text_maker, **form), PREFIX_TOKENS)(SESSION), text_maker


def ids_of(prompt: ChatPrompt) -> np.ndarray:
    token_ids = prompt.form.text_maker.ids(prompt.conversation)
    assert token_ids is not None
    return token_ids


def after(prompt: Prompt, answer: Response, turn: TurnShape) -> Prompt:
    return prompt.after(answer, turn.messages(), turn.replacement_key)


def test_session_equals_the_tokenizers_chat(tokenizer: WordTokenizer, target: TargetText) -> None:
    prompt, text_maker = opened(target)
    answer = text_maker.target.words.text(text_maker.target.words.numbers(99, 4))
    for turn in SESSION.turns[1:]:
        assert tokenizer.encode_chat(chat_messages(prompt.conversation)) == ids_of(prompt).tolist()
        assert prompt.planned_tokens() == len(ids_of(prompt))
        planned = prompt.planned_tokens()
        following = after(prompt, answered(planned, tokenizer.encode(answer), answer), turn)
        assert isinstance(following, ChatPrompt)
        prompt = following
    assert [message.role for message in prompt.conversation] == [
        *("system", "user", "assistant", "user", "assistant", "user")
    ]
    assert tokenizer.encode_chat(chat_messages(prompt.conversation)) == ids_of(prompt).tolist()
    assert (text_maker.counts.planned, text_maker.counts.exact) == (2, 2)
    assert (text_maker.counts.outputs, text_maker.counts.outputs_changed) == (1, 0)


def test_reported_token_ids_show_the_changed_output(tokenizer: WordTokenizer, target: TargetText) -> None:
    prompt, text_maker = opened(target)
    reported = [7, 8, 9]
    text = "time year people way"
    second = after(prompt, answered(prompt.planned_tokens(), tokenizer.encode(text), text), SESSION.turns[1])
    assert isinstance(second, ChatPrompt)
    planned = ids_of(second).tolist()
    head = text_maker.ids(second.conversation, 2)
    assert head is not None
    seen = [*planned[: len(head)], *reported, *planned[len(head) + 4 :]]
    answer = Response(answered(len(seen), None).record, 0.0, tokenizer.encode(text), seen, text)
    hasher = BlockHasher(HashKey(b"k" * 32), block_size=4, model="m")
    chain = second.chain(hasher, answer)
    assert chain is not None
    assert chain.source == "engine"
    assert chain.prompt == hasher.hash_blocks(np.array(seen, dtype=np.uint32))
    third = after(second, answer, SESSION.turns[2])
    assert isinstance(third, ChatPrompt)
    # The third turn goes on from what the engine saw, not from what had been planned.
    assert ids_of(third).tolist()[: len(head) + 3] == seen[: len(head) + 3]
    assert (text_maker.counts.ids_reported, text_maker.counts.ids_exact, text_maker.counts.outputs_changed) == (1, 0, 1)


def test_end_token_belongs_to_the_template(target: TargetText) -> None:
    prompt, _ = opened(target)
    ended = answered(prompt.planned_tokens(), [901, 902, 903], "?", finish_reason="stop")
    second = after(prompt, ended, SESSION.turns[2])
    assert isinstance(second, ChatPrompt)
    assert second.conversation[2].ids is not None
    assert second.conversation[2].ids.tolist() == [901, 902]


def test_output_without_token_ids_is_encoded_text(tokenizer: WordTokenizer, target: TargetText) -> None:
    """Its length as generated says whether the text is those tokens; the engine is not needed to see that."""
    text_maker = TextMaker(target, tokenizer=tokenizer)
    prompt = ChatFirstPrompts(TextForm("messages", text_maker), PREFIX_TOKENS)(SESSION)
    second = after(prompt, answered(prompt.planned_tokens(), None, "time year people"), SESSION.turns[2])
    assert isinstance(second, ChatPrompt)
    planned = second.planned_tokens()
    assert planned == len(ids_of(second))
    second.resolve(answered(planned, None, "way"))
    # Four tokens were generated, three come back: the prompt is as planned, and the answer is not what it was.
    assert (text_maker.counts.exact, text_maker.counts.outputs, text_maker.counts.outputs_changed) == (2, 1, 1)
