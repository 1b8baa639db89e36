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

    def count(self, text: str) -> int: ...

    def cut(self, text: str, tokens: int) -> str: ...


class EstimatedLengths:
    """Four bytes of UTF-8 a token: for want of a tokenizer."""

    def count(self, text: str) -> int:
        """At least 1 for a text."""
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
    """New tokens of the prompt; null: ``quoted`` is sent."""
    quoted: Sequence[VerbatimMessage] = ()
    """Messages before the response is asked for; empty: only their length is known."""
    from_tool: bool = False
    """True if the new tokens are a tool's output: the pause before it is the tool's."""
    output_tokens: int | None = None
    think_ms: float | None = None
    """From the last response to this request."""


DatasetSession = Sequence[DatasetTurn]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """Flags of a load that a dataset needs to make its sessions."""

    lengths: TextLengths
    counts_outputs: bool = True
    """True if output lengths are wanted; else no time is spent on them."""
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
    """Reads a file's sessions lazily, in order. Raises InputError naming file, line and field."""
    has_texts: bool
    """True if it has texts, not only lengths."""
    has_tools: bool = False
    """True if turns may be tool outputs."""
    cuts_turns: bool = False
    """True if its turns are cut by the flags' lengths and counts."""
