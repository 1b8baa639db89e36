"""Tokens that a chat template writes around the messages: learnt from conversations of marked words.

They depend on the order of roles (a template may close an old output otherwise than a new one), so they are learnt
for each order of a run. They must not depend on the content: two conversations are asked for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.core.draws import TokenIds
from loadgen.text.spoken import Call, SentMessage, chat_messages
from loadgen.text.tokenizer import Tokenizer, TokenizerError
from loadgen.text.words import Words

MARK = 3
"""Words that mark a place: enough not to occur by chance."""

Order = tuple[tuple[str, int], ...]
"""Role and number of tool calls of each message."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """The template's own tokens for one order: before, between and behind the places where something is said."""

    ids: tuple[tuple[int, ...], ...]
    spaced: tuple[bool, ...]
    """True for each place behind a space."""
    written: tuple[bool, ...]
    """True for each place that the template writes; some have no room for a call."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


def order_of(conversation: Sequence[SentMessage]) -> Order:
    return tuple((message.role, len(message.calls)) for message in conversation)


def learn_gaps(tokenizer: Tokenizer, words: Words, order: Order) -> Gaps:
    """Learn the template's tokens for this order of roles; raises TokenizerError if they cannot be told."""
    first, second = (_cut(tokenizer, words, order, offset) for offset in (0, len(words.texts) // 2))
    if first != second:
        raise TokenizerError("what its chat template writes depends on what is said")
    return first


def places(conversation: Sequence[SentMessage]) -> list[SentMessage | Call]:
    found: list[SentMessage | Call] = []
    for message in conversation:
        found += (message, *message.calls)
    return found


def compose(words: Words, gaps: Gaps, conversation: Sequence[SentMessage]) -> TokenIds | None:
    """Tokens of the conversation; null: unknown in part."""
    parts: list[TokenIds] = [np.asarray(gaps.ids[0], dtype=np.uint32)]
    for place, gap, spaced, written in zip(places(conversation), gaps.ids[1:], gaps.spaced, gaps.written, strict=True):
        if written:
            said = _said_ids(words, place, spaced)
            if said is None:
                return None
            parts.append(said)
        parts.append(np.asarray(gap, dtype=np.uint32))
    return np.concatenate(parts)


def compose_head(words: Words, gaps: Gaps, conversation: Sequence[SentMessage], message: int) -> TokenIds | None:
    """Tokens before message number ``message``; null: unknown in part."""
    return compose(words, _head(gaps, conversation, message), conversation[:message])


def head_length(gaps: Gaps, conversation: Sequence[SentMessage], message: int) -> int | None:
    return composed_length(_head(gaps, conversation, message), conversation[:message])


def _head(gaps: Gaps, conversation: Sequence[SentMessage], message: int) -> Gaps:
    before = len(places(conversation[:message]))
    return Gaps(gaps.ids[: before + 1], gaps.spaced[:before], gaps.written[:before])


def composed_length(gaps: Gaps, conversation: Sequence[SentMessage]) -> int | None:
    total = gaps.tokens
    for place, written in zip(places(conversation), gaps.written, strict=True):
        if not written:
            continue
        length = len(place.numbers) if isinstance(place, Call) else place.length
        if length is None:
            return None
        total += length
    return total


def _said_ids(words: Words, place: SentMessage | Call, spaced: bool) -> TokenIds | None:
    if place.numbers is not None:
        return words.ids(place.numbers, spaced=spaced)
    return place.ids if isinstance(place, SentMessage) else None


def _cut(tokenizer: Tokenizer, words: Words, order: Order, offset: int) -> Gaps:
    marked = _marked(words, order, offset)
    token_ids = tokenizer.encode_chat(chat_messages(marked))
    gaps: list[tuple[int, ...]] = []
    spaced: list[bool] = []
    written: list[bool] = []
    behind = 0
    for place in places(marked):
        assert place.numbers is not None  # marked
        plain, after_space = words.ids(place.numbers).tolist(), words.ids(place.numbers, spaced=True).tolist()
        at = _find(token_ids, (plain, after_space), behind)
        if at is None and isinstance(place, SentMessage):
            raise TokenizerError(f"its chat template changes or leaves out what the {place.role} says")
        written.append(at is not None)
        spaced.append(at is not None and token_ids[at] == after_space[0] != plain[0])
        gaps.append(() if at is None else tuple(token_ids[behind:at]))
        behind = behind if at is None else at + MARK
    return Gaps((*gaps, tuple(token_ids[behind:])), tuple(spaced), tuple(written))


def _marked(words: Words, order: Order, offset: int) -> list[SentMessage]:
    count = 0

    def mark() -> tuple[str, TokenIds]:
        nonlocal count
        numbers = (np.arange(MARK, dtype=np.uint32) + np.uint32(offset + MARK * count)) % len(words.texts)
        count += 1
        return words.text(numbers), numbers

    conversation = []
    for role, calls in order:
        text, numbers = mark()
        made = tuple(Call(*mark()) for _ in range(calls))
        conversation.append(SentMessage(role, text, numbers, calls=made))
    return conversation


def _find(token_ids: Sequence[int], marks: Sequence[Sequence[int]], behind: int) -> int | None:
    for at in range(behind, len(token_ids) - MARK + 1):
        if any(list(token_ids[at : at + MARK]) == list(mark) for mark in marks):
            return at
    return None
