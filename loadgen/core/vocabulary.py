"""Range of token ids for synthetic prompts."""

from dataclasses import dataclass

from tracefile.records.errors import InputError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ordinary token ids, ``low`` inclusive to ``high`` exclusive: no special tokens, all valid for the target."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1 << 31:
            raise InputError(
                f"--vocab-low, --vocab-high: {self.low} and {self.high}; expected 0 <= low < high <= 2147483648"
            )


ORDINARY = Vocabulary(1000, 100_000)
"""Without the special tokens at the start of vocabularies and the last ids of 100k-token vocabularies."""
