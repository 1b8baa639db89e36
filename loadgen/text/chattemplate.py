"""Tokens that a chat template adds around messages: learnt from conversations of marker words.

They depend on the order of roles (a template may end an old output unlike a new output), so they are learnt for each
order of a run. They must not depend on the content: two conversations are encoded for each order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.core.draws import TokenIds
from loadgen.text.api_messages import SentMessage, chat_messages
from loadgen.text.tokenizer import Tokenizer, TokenizerError
from loadgen.text.words import Words

MARK = 3
"""Words that mark a message: enough not to occur by chance."""

Order = tuple[str, ...]
"""Role of each message."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Template tokens for one order of roles: before, between and after the messages' content."""

    ids: tuple[tuple[int, ...], ...]
    spaced: tuple[bool, ...]
    """True for each message after a space."""


def order_of(conversation: Sequence[SentMessage]) -> Order:
    return tuple(message.role for message in conversation)


def learn_gaps(tokenizer: Tokenizer, words: Words, order: Order) -> Gaps:
    """Learn the template's tokens for this order of roles. Raises TokenizerError if they cannot be determined."""
    first, second = (_cut(tokenizer, words, order, offset) for offset in (0, len(words.texts) // 2))
    if first != second:
        raise TokenizerError("its chat template depends on the content")
    return first


def compose(
    words: Words, gaps: Gaps, conversation: Sequence[SentMessage], before: int | None = None
) -> TokenIds | None:
    """Tokens of the conversation, or of its part before message number ``before``; null: unknown."""
    head = conversation[:before]
    parts: list[TokenIds] = [np.asarray(gaps.ids[0], dtype=np.uint32)]
    for message, gap, spaced in zip(head, gaps.ids[1:], gaps.spaced, strict=False):
        ids = message.ids if message.numbers is None else words.ids(message.numbers, spaced=spaced)
        if ids is None:
            return None
        parts += [ids, np.asarray(gap, dtype=np.uint32)]
    return np.concatenate(parts)


def composed_length(gaps: Gaps, conversation: Sequence[SentMessage], before: int | None = None) -> int | None:
    """Token count of ``compose``; known also where its tokens are not."""
    head = conversation[:before]
    lengths = [message.length for message in head]
    if None in lengths:
        return None
    return sum(map(len, gaps.ids[: len(head) + 1])) + sum(length for length in lengths if length is not None)


def _cut(tokenizer: Tokenizer, words: Words, order: Order, offset: int) -> Gaps:
    marked = [_marked(words, role, offset + MARK * index) for index, role in enumerate(order)]
    token_ids = tokenizer.encode_chat(chat_messages(marked))
    gaps: list[tuple[int, ...]] = []
    spaced: list[bool] = []
    position = 0
    for message in marked:
        assert message.numbers is not None
        plain, after_space = (words.ids(message.numbers, spaced=after).tolist() for after in (False, True))
        start = _find(token_ids, (plain, after_space), position)
        if start is None:
            raise TokenizerError(f"its chat template changes or omits {message.role} messages")
        spaced.append(token_ids[start] == after_space[0] != plain[0])
        gaps.append(tuple(token_ids[position:start]))
        position = start + MARK
    return Gaps((*gaps, tuple(token_ids[position:])), tuple(spaced))


def _marked(words: Words, role: str, offset: int) -> SentMessage:
    numbers = (np.arange(MARK, dtype=np.uint32) + np.uint32(offset)) % len(words.texts)
    return SentMessage(role, words.text(numbers), numbers)


def _find(token_ids: Sequence[int], marks: Sequence[Sequence[int]], first: int) -> int | None:
    for start in range(first, len(token_ids) - MARK + 1):
        if any(list(token_ids[start : start + MARK]) == list(mark) for mark in marks):
            return start
    return None
