"""What a turn says: token ids for ``/v1/completions``, words for ``/v1/chat/completions``.

A conversation's next prompt is the prompt before, the model's real answer, and new tokens; both kinds know how to
serialise themselves and how to go on from an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from loadgen.bodies import Message, chat_body, completions_body
from loadgen.draws import Stream, TokenIds, Vocabulary, below, draw, mix64, tokens_of
from loadgen.hashing import Chain, hash_request
from loadgen.plan import Answer
from loadgen.workload import SessionShape, TurnShape
from tracefile import BlockHash, BlockHasher

COMPLETIONS_PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"

WORDS = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water
room mother area money story fact month lot right study book eye job word business issue side kind head
house service friend father power hour game line end member law car city community name president team
minute idea kid body back parent face others level office door health person art war history party result
change morning reason research girl guy moment air teacher force education foot boy age policy music market
sense plan college interest death
""".split()  # noqa: SIM905 - a list of a hundred literals reads worse
"""Common English words, one token each in most vocabularies; how many they really were is reported by usage."""


class Prompt(Protocol):
    """A turn's prompt."""

    @property
    def path(self) -> str:
        """The endpoint it is for."""

    def body(self, model: str, max_tokens: int) -> bytes:
        """The request body."""

    def planned_tokens(self) -> int | None:
        """The prompt's length; null: only the engine's tokenizer knows."""

    def chain(self, hasher: BlockHasher, answer: Answer) -> Chain | None:
        """The block hashes of the request that this prompt was; null: its ids are unknown."""

    def after(self, answer: Answer, turn: TurnShape) -> "Prompt":
        """The next turn's prompt."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt of token ids."""

    token_ids: TokenIds
    vocabulary: Vocabulary
    known: list[BlockHash]
    """Hashes of its first blocks, as far as the turns before told them; one list for a whole conversation."""

    @property
    def path(self) -> str:
        """Completions take ids."""
        return COMPLETIONS_PATH

    def body(self, model: str, max_tokens: int) -> bytes:
        """A body with the ids as they are."""
        return completions_body(model, self.token_ids, max_tokens)

    def planned_tokens(self) -> int | None:
        """Exact: ids are not tokenized again."""
        return len(self.token_ids)

    def chain(self, hasher: BlockHasher, answer: Answer) -> Chain | None:
        """Hashed from where the chain is known; what this adds is known to the next turn."""
        chain = hash_request(hasher, self.known, self.token_ids, answer.token_ids)
        self.known[:] = chain.whole()
        return chain

    def after(self, answer: Answer, turn: TurnShape) -> Prompt:
        """This prompt, the generated ids (stand-ins where the engine returned none) and the turn's new ids."""
        if answer.token_ids is None:
            key = mix64(turn.prompt_key + Stream.STAND_IN_TOKENS)
            generated = tokens_of(key, answer.record.output_tokens or 0, self.vocabulary)
        else:
            generated = np.asarray(answer.token_ids, dtype=np.uint32)
        new = tokens_of(turn.prompt_key, turn.prompt_tokens, self.vocabulary)
        return TokenPrompt(np.concatenate([self.token_ids, generated, new]), self.vocabulary, self.known)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt of chat messages; lengths are as near as one token a word gets."""

    messages: Sequence[Message]

    @property
    def path(self) -> str:
        """Chat takes messages."""
        return CHAT_PATH

    def body(self, model: str, max_tokens: int) -> bytes:
        """A body with the messages so far."""
        return chat_body(model, self.messages, max_tokens)

    def planned_tokens(self) -> int | None:
        """Unknown: the chat template and tokenizer are the engine's."""
        return None

    def chain(self, hasher: BlockHasher, answer: Answer) -> Chain | None:
        """Hashed over the ids that the engine says it saw; null where it does not say."""
        if answer.prompt_token_ids is None:
            return None
        return hash_request(hasher, (), np.asarray(answer.prompt_token_ids, dtype=np.uint32), answer.token_ids)

    def after(self, answer: Answer, turn: TurnShape) -> Prompt:
        """These messages, the model's answer and a new user message."""
        said = {"role": "assistant", "content": answer.text}
        asked = {"role": "user", "content": words_of(turn.prompt_key, turn.prompt_tokens)}
        return ChatPrompt([*self.messages, said, asked])


def words_of(key: int, count: int) -> str:
    """``count`` words for one key."""
    return " ".join(WORDS[below(draw(key, Stream.PROMPT_TOKENS, index), len(WORDS))] for index in range(count))


@dataclass(slots=True)
class TokenOpening:
    """Makes sessions' first prompts of token ids; each shared prefix is made and hashed once."""

    vocabulary: Vocabulary
    prefix_tokens: int
    hasher: BlockHasher
    _prefixes: dict[int, tuple[TokenIds, list[BlockHash]]] = field(default_factory=dict)

    def __call__(self, session: SessionShape) -> Prompt:
        """The first turn's prompt."""
        turn = session.turns[0]
        new = tokens_of(turn.prompt_key, turn.prompt_tokens, self.vocabulary)
        if session.prefix is None:
            return TokenPrompt(new, self.vocabulary, [])
        if session.prefix not in self._prefixes:
            prefix = tokens_of(session.prefix_key, self.prefix_tokens, self.vocabulary)
            self._prefixes[session.prefix] = prefix, self.hasher.hash_blocks(prefix)
        prefix, known = self._prefixes[session.prefix]
        return TokenPrompt(np.concatenate([prefix, new]), self.vocabulary, list(known))


@dataclass(frozen=True, slots=True)
class ChatOpening:
    """Makes sessions' first prompts of chat messages: the shared prefix is the system message."""

    prefix_tokens: int

    def __call__(self, session: SessionShape) -> Prompt:
        """The first turn's prompt."""
        turn = session.turns[0]
        asked = {"role": "user", "content": words_of(turn.prompt_key, turn.prompt_tokens)}
        if session.prefix is None:
            return ChatPrompt([asked])
        return ChatPrompt([{"role": "system", "content": words_of(session.prefix_key, self.prefix_tokens)}, asked])
