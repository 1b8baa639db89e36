"""Dataset sessions: turns with token counts or texts, as far as the dataset has them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.text.messages import VerbatimMessage

BYTES_A_TOKEN = 4
CountTokens = Callable[[str], int]


def estimated_tokens(text: str) -> int:
    """Estimate without a tokenizer: four bytes of UTF-8 a token; at least 1 for a text."""
    return -(-len(text.encode("utf-8", "replace")) // BYTES_A_TOKEN)


@dataclass(frozen=True, slots=True)
class DatasetTurn:
    """Turn of a session. The load's flags replace null fields."""

    new_tokens: int | None = None
    """New tokens of the prompt; null: ``quoted`` is sent."""
    quoted: Sequence[VerbatimMessage] = ()
    """Messages before the response; empty: only their token count is known."""
    output_tokens: int | None = None
    think_ms: float | None = None
    """From the previous response to this request."""


DatasetSession = Sequence[DatasetTurn]


@dataclass(frozen=True, slots=True)
class Dataset:
    """Dataset format: its reader, and whether it has texts or only token counts."""

    read: Callable[[Path, CountTokens | None], Iterator[DatasetSession]]
    """Reads a file's sessions lazily, in order; counts output tokens of texts, null: not needed. Raises InputError with
    file, line and field."""
    has_texts: bool
    """True if it has texts, not only token counts."""
