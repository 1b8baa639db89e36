"""How long a dataset's texts are in tokens: by the target's tokenizer, or guessed."""

from typing import Protocol

from loadgen.text.tokenizer import Tokenizer

BYTES_A_TOKEN = 4


class TextLengths(Protocol):
    """Counts and cuts texts."""

    def count(self, text: str) -> int:
        """How many tokens a text is."""

    def cut(self, text: str, tokens: int) -> str:
        """The beginning of a text, of at most so many tokens."""


class EstimatedLengths:
    """Four bytes of UTF-8 a token: for want of a tokenizer."""

    def count(self, text: str) -> int:
        """Never 0 for a text."""
        return -(-len(text.encode("utf-8", "replace")) // BYTES_A_TOKEN)

    def cut(self, text: str, tokens: int) -> str:
        """A character that the cut would divide is left out."""
        return text.encode("utf-8", "replace")[: tokens * BYTES_A_TOKEN].decode("utf-8", "ignore")


class TokenizerLengths:
    """By a tokenizer: exact for a text by itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def count(self, text: str) -> int:
        """The ids that the tokenizer makes of it."""
        return len(self._tokenizer.encode(text))

    def cut(self, text: str, tokens: int) -> str:
        """What its first ids spell; a character that lies across the cut is left out."""
        token_ids = self._tokenizer.encode(text)
        return text if len(token_ids) <= tokens else self._tokenizer.decode(token_ids[:tokens]).rstrip("\ufffd")


ESTIMATED = EstimatedLengths()
