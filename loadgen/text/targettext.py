"""Text of the target, learnt before a run: words that are one token each, and the chat template's tokens."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from loadgen.core.draws import TokenIds
from loadgen.text.chattemplate import (
    Gaps,
    Order,
    compose,
    compose_head,
    composed_length,
    head_length,
    learn_gaps,
    order_of,
)
from loadgen.text.messages import Piece, PlannedMessage, SyntheticMessage
from loadgen.text.prefixtruth import Examination, PrefixTruth, examine
from loadgen.text.spoken import Call, SentMessage, chat_messages
from loadgen.text.tokenizer import LocalTokenizer, Tokenizer, TokenizerError
from loadgen.text.words import UNPROVEN, Words, find_words, prove

MOST_ORDERS = 256
"""Orders of roles learnt before a run; a local tokenizer learns others later."""
SHORTEST_CALL = Piece(0, 1)


@dataclass(frozen=True, slots=True)
class TargetText:
    """Plain values; ``unknown`` says why nothing is promised of its prompts."""

    words: Words
    gaps: Mapping[Order, Gaps]
    tokenizer: str | None = None
    """Tokenizer's directory name, or ``engine``; null: none could be asked."""
    path: Path | None = None
    """Of the tokenizer; null: the engine was asked."""
    unknown: str | None = None

    def fingerprint(self, *, rendered: bool) -> str:
        """Digest of the words; ``rendered``: also of their ids and the template's."""
        said: object = (self.words, *self.gaps.items()) if rendered else self.words.texts
        return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


NO_TARGET = TargetText(UNPROVEN, {}, unknown="no tokenizer was asked")


def learn_target(tokenizer: Tokenizer, orders: Iterable[Order], path: Path | None = None) -> TargetText:
    """Find the words and learn the template for each order. Where that fails, ``unknown`` says why."""
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
    """Makes messages in words, and says what they are in tokens."""

    target: TargetText
    truth: PrefixTruth = field(default_factory=PrefixTruth)
    tokenizer: Tokenizer | None = None
    """Learns orders and encodes texts; null: only the data learnt before the run."""
    _gaps: dict[Order, Gaps | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._gaps |= self.target.gaps

    def say(self, said: PlannedMessage) -> SentMessage:
        if not isinstance(said, SyntheticMessage):
            return SentMessage(said.role, said.text, quoted=said.message)
        numbers = self.numbers(said.pieces)
        return SentMessage(said.role, self.target.words.text(numbers), numbers, length=len(numbers))

    def call(self, said: PlannedMessage) -> Call | None:
        """The call that a tool's message answers; null: no tool message."""
        if said.role != "tool":
            return None
        piece = said.call if isinstance(said, SyntheticMessage) else None
        numbers = self.numbers([piece or SHORTEST_CALL])
        return Call(self.target.words.text(numbers), numbers)

    def numbers(self, pieces: Sequence[Piece]) -> TokenIds:
        return np.concatenate([self.target.words.numbers(piece.key, piece.tokens) for piece in pieces])

    def ids(self, conversation: Sequence[SentMessage]) -> TokenIds | None:
        if any(message.quoted is not None for message in conversation):
            return self._encoded(conversation)
        gaps = self.gaps(order_of(conversation))
        return None if gaps is None else compose(self.target.words, gaps, conversation)

    def head(self, conversation: Sequence[SentMessage], message: int) -> TokenIds | None:
        gaps = self.gaps(order_of(conversation))
        return None if gaps is None else compose_head(self.target.words, gaps, conversation, message)

    def head_length(self, conversation: Sequence[SentMessage], message: int) -> int | None:
        gaps = self.gaps(order_of(conversation))
        return None if gaps is None else head_length(gaps, conversation, message)

    def length(self, conversation: Sequence[SentMessage]) -> int | None:
        if any(message.quoted is not None for message in conversation):
            token_ids = self._encoded(conversation)
            return None if token_ids is None else len(token_ids)
        gaps = self.gaps(order_of(conversation))
        return None if gaps is None else composed_length(gaps, conversation)

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
    """A shard's text maker; ``encodes``: also load the local tokenizer (seconds), to encode texts during the run."""
    return TextMaker(target, tokenizer=LocalTokenizer(target.path) if encodes and target.path is not None else None)


def examine_conversations(
    tokenizer: Tokenizer,
    text_maker: TextMaker,
    conversations: Sequence[Sequence[SentMessage]],
    pair: tuple[int, int] | None,
) -> Examination:
    """Compare planned prompts with the tokenizer's encoding of them; ``pair``: two that share a planned prefix."""
    try:
        encoded = [np.asarray(tokenizer.encode_chat(chat_messages(each)), dtype=np.uint32) for each in conversations]
    except TokenizerError as error:
        return Examination(tokenizer=tokenizer.name, unknown=str(error))
    gaps = text_maker.gaps(order_of(conversations[0])) if conversations else None
    planned = [text_maker.ids(each) for each in conversations]
    template_tokens = None if gaps is None else gaps.tokens
    return examine(planned, encoded, pair, tokenizer=tokenizer.name, template_tokens=template_tokens)
