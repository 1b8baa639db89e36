"""Chats with images: their chain is that of the text before the first one."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap.prompts.chatmessages import UntokenizableError
from tap.prompts.prompt import ids_before_media, media_messages

TEXT = st.text("xyz0a", max_size=3)
PART = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}),
    st.fixed_dictionaries({"type": st.just("image"), "image": st.sampled_from(["cat", "sea"])}),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system"]), "content": TEXT | st.lists(PART, max_size=3)}
)


class Engine:
    """A letter is a token, an image five of its own."""

    def encode_text(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        return [token for message in body["messages"] for token in self._message(message)] + [62]

    def _message(self, message: Mapping[str, Any]) -> list[int]:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        said = [self._part(part) for part in parts]
        return [*message["role"].encode(), 58, *(token for tokens in said for token in tokens), 124]

    def _part(self, part: Mapping[str, Any]) -> list[int]:
        return [ord(one) for one in part["text"]] if part["type"] == "text" else [1000 + ord(part["image"][0])] * 5


class Deaf(Engine):
    """Leaves out what users say."""

    def encode_chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        return [token for message in body["messages"] for token in message["role"].encode()]


@given(st.lists(st.lists(MESSAGE, min_size=1, max_size=5), min_size=2, max_size=6))
def test_no_two_chats_share_more_by_their_ids_than_in_truth(chats: list[list[Any]]) -> None:
    def shared(one: Sequence[int], other: Sequence[int]) -> int:
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))

    engine = Engine()
    bodies = [body for body in ({"messages": chat} for chat in chats) if media_messages(body)]
    read = [(ids_before_media(engine, body, media_messages(body)), engine.encode_chat(body)) for body in bodies]
    for ids, true in read:
        assert shared(ids, true) == len(ids)
        for other, other_true in read:
            assert shared(ids, other) <= shared(true, other_true)


def test_the_chain_ends_at_the_first_image_and_a_template_that_hides_it_has_none() -> None:
    body = {"messages": [{"role": "user", "content": "xx"}, {"role": "user", "content": [{"type": "image"}]}]}
    assert bytes(ids_before_media(Engine(), body, media_messages(body))) == b"user:xx|user"
    with pytest.raises(UntokenizableError):
        ids_before_media(Deaf(), body, media_messages(body))
