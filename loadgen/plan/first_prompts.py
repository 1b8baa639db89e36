"""First prompts of sessions: a shared prefix and new tokens, as token ids or as messages."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from loadgen.core.draws import PIECE, TokenIds, expand_tokens, tokens_of
from loadgen.plan.shapes import SessionShape
from loadgen.text.api_messages import SentMessage
from loadgen.text.chattemplate import Order
from loadgen.text.messages import PlannedMessage, SyntheticMessage
from loadgen.text.prompts import ChatPrompt, Prompt, TextForm, TokenForm, TokenPrompt
from loadgen.text.targettext import MOST_ORDERS
from tracefile.hashing.blockhash import BlockHasher
from tracefile.hashing.branches import BranchFinder
from tracefile.records.schema import BlockHash, RequestId

AHEAD = 32
"""Sessions whose prompt tokens are drawn at once; longer prompts are drawn when built, so that no send is delayed."""
MOST_SESSIONS = 1000
"""Sessions searched for orders of roles before a run."""


@dataclass(slots=True)
class TokenFirstPrompts:
    """First prompts of token ids; each shared prefix is drawn and hashed once."""

    form: TokenForm
    prefix_tokens: int
    hasher: BlockHasher
    branches: BranchFinder | None = None
    """Registers each prefix under a name that is equal in all shards."""
    _prefixes: dict[int, tuple[TokenIds, list[BlockHash]]] = field(default_factory=dict)
    _tokens_ahead: dict[int, TokenIds] = field(default_factory=dict)

    def draw_ahead(self, sessions: Iterator[SessionShape]) -> Iterator[SessionShape]:
        """Yield the sessions, with prompt tokens drawn in batches: a ninth of the time of single draws."""
        while batch := list(islice(sessions, AHEAD)):
            turns = [session.turns[0] for session in batch]
            longest = max(turn.prompt_tokens for turn in turns)
            if longest <= PIECE // AHEAD:
                keys = np.array([turn.prompt_key for turn in turns], dtype=np.uint64)
                token_ids = expand_tokens(keys, longest, self.form.vocabulary)
                self._tokens_ahead |= {turn.prompt_key: row for turn, row in zip(turns, token_ids, strict=True)}
            yield from batch

    def __call__(self, session: SessionShape) -> Prompt:
        turn = session.turns[0]
        token_ids = self._tokens_ahead.pop(turn.prompt_key, None)
        new = self.form.ids(turn.messages()) if token_ids is None else [token_ids[: turn.prompt_tokens]]
        if session.prefix is None:
            return TokenPrompt(np.concatenate(new), self.form, [])
        if session.prefix not in self._prefixes:
            prefix = tokens_of(session.prefix_key, self.prefix_tokens, self.form.vocabulary)
            hashes = self.hasher.hash_blocks(prefix)
            if self.branches is not None:
                self.branches.add(self.hasher.root, hashes, prefix, (), RequestId(f"prefix {session.prefix}"))
            self._prefixes[session.prefix] = prefix, hashes
        prefix, hashes = self._prefixes[session.prefix]
        return TokenPrompt(np.concatenate([prefix, *new]), self.form, list(hashes))


@dataclass(slots=True)
class ChatFirstPrompts:
    """First prompts of messages; the shared prefix is the system message, rendered once."""

    form: TextForm
    prefix_tokens: int
    _prefixes: dict[int, SentMessage] = field(default_factory=dict)

    def draw_ahead(self, sessions: Iterator[SessionShape]) -> Iterator[SessionShape]:
        """Unchanged sessions: words are drawn faster than they are encoded."""
        return sessions

    def __call__(self, session: SessionShape) -> ChatPrompt:
        text_maker = self.form.text_maker
        conversation = [text_maker.sent_message(message) for message in session.turns[0].messages()]
        if session.prefix is None:
            return ChatPrompt(self.form, conversation)
        if session.prefix not in self._prefixes:
            self._prefixes[session.prefix] = text_maker.sent_message(prefix_of(session, self.prefix_tokens))
        return ChatPrompt(self.form, [self._prefixes[session.prefix], *conversation])


def prefix_of(session: SessionShape, tokens: int) -> PlannedMessage:
    return SyntheticMessage("system", session.prefix_key, tokens)


def orders_of(sessions: Iterable[SessionShape], prefix_tokens: int) -> list[Order]:
    orders: dict[Order, None] = {}
    for number, session in enumerate(sessions):
        if number >= MOST_SESSIONS or len(orders) >= MOST_ORDERS:
            break
        orders |= dict.fromkeys(_orders(session, prefix_tokens))
    return list(orders)[:MOST_ORDERS]


def _orders(session: SessionShape, prefix_tokens: int) -> Iterator[Order]:
    order: Order = () if session.prefix is None or not prefix_tokens else ("system",)
    for index, turn in enumerate(session.turns):
        order = (*order, *(("assistant",) if index else ()), *(message.role for message in turn.messages()))
        yield order
