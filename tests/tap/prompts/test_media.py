"""Chats with images against an engine that knows how long each is: whatever the hashes say is shared, is."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap.prompts.chatmessages import UntokenizableError
from tap.prompts.media import MediaIds, MediaSizes, ids_with_media, media_messages

SIZES = {"cat": 5, "sea": 9, "dot": 1}
"""Tokens that the engine makes of each image."""


class Engine:
    """A letter is a token, an image so many of its own; media stand where they are, or before their message's text."""

    def __init__(self, media_first: bool) -> None:
        self.media_first = media_first

    def encode_text(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        return [token for message in body["messages"] for token in self._message(message)] + [62]

    def _message(self, message: Mapping[str, Any]) -> list[int]:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        if self.media_first:
            parts.sort(key=lambda part: part["type"] == "text")
        said = [token for part in parts for token in self._part(part)]
        return [*self.encode_text(message["role"] + ":", add_special_tokens=False), *said, 124]

    def _part(self, part: Mapping[str, Any]) -> Sequence[int]:
        if part["type"] == "text":
            return self.encode_text(part["text"], add_special_tokens=False)
        return [1000 + ord(part["image"][0])] * SIZES[part["image"]]


TEXT = st.text("xyz0a", max_size=3)
PART = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}),
    st.fixed_dictionaries({"type": st.just("image"), "image": st.sampled_from(sorted(SIZES))}),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system"]), "content": TEXT | st.lists(PART, max_size=3)}
)
CONVERSATION = st.lists(MESSAGE, min_size=1, max_size=5)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def read(engine: Engine, sizes: MediaSizes, messages: list[Any], usage: bool = True) -> tuple[MediaIds, Sequence[int]]:
    """What is known of a chat's ids, and what they are."""
    body = {"model": "m", "messages": messages}
    true = engine.encode_chat(body)
    found = ids_with_media(engine, sizes, body, media_messages(body), len(true) if usage else None)
    return found, true


def needed(messages: list[Any]) -> bool:
    return bool(media_messages({"messages": messages}))


@given(st.lists(CONVERSATION.filter(needed), min_size=2, max_size=6), st.booleans())
def test_no_two_chats_share_more_by_their_ids_than_in_truth(chats: list[list[Any]], media_first: bool) -> None:
    engine, sizes = Engine(media_first), MediaSizes()
    read_chats = [read(engine, sizes, chat) for chat in chats]
    for found, true in read_chats:
        assert not found.whole or len(found.ids) == len(true)
        for other, other_true in read_chats:
            assert shared(found.ids, other.ids) <= shared(true, other_true)


@given(CONVERSATION.filter(needed), CONVERSATION, st.booleans())
def test_what_follows_a_chat_shares_all_of_it_once_its_images_are_known(
    chat: list[Any], more: list[Any], media_first: bool
) -> None:
    engine, sizes = Engine(media_first), MediaSizes()
    for end in range(1, len(chat) + 1):  # each turn brings at most one message that is new
        if needed(chat[:end]):
            found, true = read(engine, sizes, chat[:end])
    assert found.whole
    assert len(found.ids) == len(true)
    longer, longer_true = read(engine, sizes, chat + more)
    # All but the letter with which the answer would begin, and one beside an image at the very end.
    assert shared(found.ids, longer.ids) >= min(shared(true, longer_true), len(found.ids) - 1) - 1


def image(name: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": name}]}


def test_a_length_that_stopped_being_right_is_forgotten_and_learnt_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sizes = Engine(False), MediaSizes()
    assert read(engine, sizes, [image("cat")])[0].solved
    assert read(engine, sizes, [image("cat")])[0] == MediaIds(read(engine, sizes, [image("cat")])[0].ids, True, False)
    monkeypatch.setitem(SIZES, "cat", 7)
    stale, _ = read(engine, sizes, [image("cat")])
    assert (stale.whole, list(stale.ids)) == (False, [ord(letter) for letter in "user"])
    fresh, true = read(engine, sizes, [image("cat")])
    assert (fresh.solved, len(fresh.ids)) == (True, len(true))


def test_the_same_image_twice_is_one_unknown_and_two_images_are_two() -> None:
    engine = Engine(False)
    twice, true = read(engine, MediaSizes(), [image("cat"), image("cat")])
    assert (twice.whole, len(twice.ids)) == (True, len(true))
    two, _ = read(engine, MediaSizes(), [image("cat"), image("sea")])
    assert (two.whole, two.solved, list(two.ids)) == (False, False, [ord(letter) for letter in "user"])


def test_without_usage_only_what_is_known_counts() -> None:
    engine, sizes = Engine(False), MediaSizes()
    assert not read(engine, sizes, [image("cat")], usage=False)[0].whole
    read(engine, sizes, [image("cat")])
    found, true = read(engine, sizes, [image("cat")], usage=False)
    assert (found.whole, found.solved, len(found.ids)) == (True, False, len(true))


def test_usage_that_cannot_be_this_prompts_tells_nothing() -> None:
    body = {"model": "m", "messages": [image("cat")]}
    for usage in (0, 3, 1 << 40):
        assert not ids_with_media(Engine(False), MediaSizes(), body, [0], usage).whole


class Deaf(Engine):
    """Leaves out what users say."""

    def encode_chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        return [token for message in body["messages"] for token in message["role"].encode()]


class Twofold(Engine):
    """Says everything twice."""

    def encode_chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        return [*super().encode_chat(body), *super().encode_chat(body)]


def test_a_template_that_does_not_show_where_the_content_is_shows_what_comes_before_or_nothing() -> None:
    body = {"model": "m", "messages": [image("cat")]}
    found = ids_with_media(Twofold(False), MediaSizes(), body, [0], 99)
    assert (found.whole, list(found.ids)) == (False, [ord(letter) for letter in "user"])
    with pytest.raises(UntokenizableError):
        ids_with_media(Deaf(False), MediaSizes(), body, [0], 99)
