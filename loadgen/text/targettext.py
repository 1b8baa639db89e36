"""Text of the target, learnt before a run: words of one token each, and the chat template's tokens."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from loadgen.core.draws import TokenIds
from loadgen.text.api_messages import SentMessage, chat_messages
from loadgen.text.chattemplate import Gaps, Order, compose, composed_length, learn_gaps, order_of
from loadgen.text.messages import PlannedMessage, SyntheticMessage
from loadgen.text.prompt_token_check import PromptTokenCounts
from loadgen.text.tokenizer import LocalTokenizer, Tokenizer, TokenizerError
from loadgen.text.words import UNPROVEN, Words, find_words, prove

MOST_ORDERS = 256
"""Orders of roles learnt before a run; a local tokenizer learns more later."""


@dataclass(frozen=True, slots=True)
class TargetText:
    """Words, template and tokenizer of the target, picklable; ``unknown``: why token counts are unverified."""

    words: Words
    gaps: Mapping[Order, Gaps]
    tokenizer: str | None = None
    """Tokenizer's directory name, or ``engine``; null: no tokenizer."""
    path: Path | None = None
    """Directory of the tokenizer; null: the engine's tokenizer."""
    unknown: str | None = None

    def fingerprint(self, *, with_ids: bool = False) -> str:
        """Digest of the words; ``with_ids``: also of their token ids and the template's."""
        parts: object = (self.words, *self.gaps.items()) if with_ids else self.words.texts
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


NO_TARGET = TargetText(UNPROVEN, {}, unknown="no tokenizer")


def learn_target(tokenizer: Tokenizer, orders: Iterable[Order], path: Path | None = None) -> TargetText:
    """Learn words and the template's tokens for each order of roles. ``unknown`` holds the reason of a failure."""
    try:
        words = find_words(tokenizer)
        prove(tokenizer, words, seed=0)
    except TokenizerError as error:
        return TargetText(UNPROVEN, {}, tokenizer.name, path, str(error))
    gaps: dict[Order, Gaps] = {}
    unknown = None
    for order in orders:
        try:
            gaps[order] = learn_gaps(tokenizer, words, order)
        except TokenizerError as error:
            unknown = str(error)
    return TargetText(words, gaps, tokenizer.name, path, unknown)


@dataclass(slots=True)
class TextMaker:
    """Renders messages in words, and computes their tokens."""

    target: TargetText
    counts: PromptTokenCounts = field(default_factory=PromptTokenCounts)
    tokenizer: Tokenizer | None = None
    """Learns orders and encodes texts; null: only the data learnt before the run."""
    _gaps: dict[Order, Gaps | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._gaps |= self.target.gaps

    def sent_message(self, planned: PlannedMessage) -> SentMessage:
        if not isinstance(planned, SyntheticMessage):
            return SentMessage(planned.role, planned.text, quoted=planned.message)
        return self.message(planned.role, self.target.words.numbers(planned.key, planned.tokens))

    def message(self, role: str, numbers: TokenIds) -> SentMessage:
        return SentMessage(role, self.target.words.text(numbers), numbers, length=len(numbers))

    def ids(self, conversation: Sequence[SentMessage], before: int | None = None) -> TokenIds | None:
        """Tokens of a conversation, or of its part before message number ``before``; null: unknown."""
        if any(message.quoted is not None for message in conversation):
            return self._encoded(conversation) if before is None else None
        gaps = self.gaps(order_of(conversation))
        return None if gaps is None else compose(self.target.words, gaps, conversation, before)

    def length(self, conversation: Sequence[SentMessage], before: int | None = None) -> int | None:
        """Token count of ``ids``; known also where the ids are not."""
        if any(message.quoted is not None for message in conversation):
            token_ids = self.ids(conversation, before)
            return None if token_ids is None else len(token_ids)
        gaps = self.gaps(order_of(conversation))
        return None if gaps is None else composed_length(gaps, conversation, before)

    def gaps(self, order: Order) -> Gaps | None:
        if order not in self._gaps:
            self._gaps[order] = self._learn(order)
        return self._gaps[order]

    def encode(self, text: str) -> TokenIds | None:
        return None if self.tokenizer is None else np.asarray(self.tokenizer.encode(text), dtype=np.uint32)

    def _learn(self, order: Order) -> Gaps | None:
        if self.tokenizer is None or not self.target.words.starts:
            return None
        try:
            return learn_gaps(self.tokenizer, self.target.words, order)
        except TokenizerError:
            return None

    def _encoded(self, conversation: Sequence[SentMessage]) -> TokenIds | None:
        if self.tokenizer is None:
            return None
        try:
            return np.asarray(self.tokenizer.encode_chat(chat_messages(conversation)), dtype=np.uint32)
        except TokenizerError:
            return None


def open_text_maker(target: TargetText, *, encodes: bool = True) -> TextMaker:
    """Text maker of a worker; ``encodes``: also load the local tokenizer (seconds), to encode texts during the run."""
    return TextMaker(target, tokenizer=LocalTokenizer(target.path) if encodes and target.path is not None else None)
