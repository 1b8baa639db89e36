"""Dataset sessions: turns with lengths or texts, as far as the dataset has them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from loadgen.core.lengths import LengthDistribution
from loadgen.text.messages import VerbatimMessage
from loadgen.text.tokenizer import Tokenizer

BYTES_A_TOKEN = 4


class TextLengths(Protocol):
    """Counts and cuts texts."""

    def count(self, text: str) -> int:
        """Return the number of tokens."""

    def cut(self, text: str, tokens: int) -> str:
        """Return the beginning of a text, of at most ``tokens`` tokens."""


class EstimatedLengths:
    """Four bytes of UTF-8 a token: for want of a tokenizer."""

    def count(self, text: str) -> int:
        """Return the number of tokens, at least 1 for a text."""
        return -(-len(text.encode("utf-8", "replace")) // BYTES_A_TOKEN)

    def cut(self, text: str, tokens: int) -> str:
        """Return the beginning of a text, without a character that the cut divides."""
        return text.encode("utf-8", "replace")[: tokens * BYTES_A_TOKEN].decode("utf-8", "ignore")


class TokenizerLengths:
    """Counts and cuts with a tokenizer: exact for a text by itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def cut(self, text: str, tokens: int) -> str:
        """Return the beginning of a text, without a character that the cut divides."""
        token_ids = self._tokenizer.encode(text)
        return text if len(token_ids) <= tokens else self._tokenizer.decode(token_ids[:tokens]).rstrip("\ufffd")


ESTIMATED = EstimatedLengths()


@dataclass(frozen=True, slots=True)
class DatasetTurn:
    """Request of a session. The load's flags replace null fields."""

    new_tokens: int | None = None
    """How long the prompt's new part is, all before it not counted; null: ``quoted`` is what is said."""
    quoted: Sequence[VerbatimMessage] = ()
    """Messages before the response is asked for; empty: only their length is known."""
    from_tool: bool = False
    """Whether the new tokens are a tool's output, not a user's message."""
    output_tokens: int | None = None
    think_ms: float | None = None
    """From the answer before to this request."""


DatasetSession = Sequence[DatasetTurn]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """Flags of a load that a dataset needs to make its sessions."""

    lengths: TextLengths
    counts_outputs: bool = True
    """Whether answers' lengths are wanted; else no time is spent on them."""
    seed: int = 0
    min_turns: int | None = None
    max_turns: int | None = None
    first_turn_tokens: LengthDistribution | None = None
    subsequent_turn_tokens: LengthDistribution | None = None
    tool_role: Literal["user", "tool"] = "user"


@dataclass(frozen=True, slots=True)
class Dataset:
    """A format that loads can be made from."""

    read: Callable[[Path, DatasetOptions], Iterator[DatasetSession]]
    """The sessions of a file, in its order, as they are needed. Raises InputError naming file, line and field."""
    has_texts: bool
    """Whether it says what is said, or lengths alone."""
    cuts_turns: bool = False
    """Whether it makes turns of the lengths and the number that the flags say, instead of having its own."""
