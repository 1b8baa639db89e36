"""Requests that a format cannot hold, counted by reason, and the error where none is left."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from tracefile.records.errors import USAGE_ADVICE, InputError
from tracefile.records.schema import Record


@dataclass(slots=True)
class Loss:
    """Account of an export: what its lines do not say, and requests without a line."""

    kept: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Requests without a line, by reason."""
    changed: Counter[str] = field(default_factory=Counter)
    """Requests with a line that says something else, by what."""

    def lines(self) -> list[str]:
        """Sentences of the account."""
        found = [f"{count:,} requests left out: {reason}" for reason, count in (+self.left_out).items()]
        return found + [f"{count:,} requests {change}" for change, count in (+self.changed).items()]

    def check(self, where: str, target: str) -> None:
        """Raise InputError if no request was kept."""
        if self.kept:
            return
        reasons = ", ".join(self.left_out) or "the trace has no requests"
        raise InputError(f"{where}: nothing to write as {target}: {reasons}{self._advice()}")

    def _advice(self) -> str:
        advice = [_ADVICE[reason] for reason in self.left_out if reason in _ADVICE]
        return "".join(f"; {one}" for one in dict.fromkeys(advice)) or "; expected other requests"


NO_PROMPT_TOKENS: Final = "no prompt_tokens"
NO_OUTPUT_TOKENS: Final = "no output_tokens"
NO_ARRIVAL: Final = "no arrival_ms"
_ADVICE: Final = {
    NO_PROMPT_TOKENS: USAGE_ADVICE,
    NO_OUTPUT_TOKENS: USAGE_ADVICE,
    NO_ARRIVAL: "choose --to trie, which needs none",
}


def with_lengths(records: Iterable[Record], loss: Loss) -> Iterator[Record]:
    """Records whose prompt and output lengths are known."""
    for record in records:
        if record.prompt_tokens is None:
            loss.left_out[NO_PROMPT_TOKENS] += 1
        elif record.output_tokens is None:
            loss.left_out[NO_OUTPUT_TOKENS] += 1
        else:
            yield record


def with_arrivals(records: Iterable[Record], loss: Loss) -> Iterator[Record]:
    """Records whose arrival is known."""
    for record in records:
        if record.arrival_ms is None:
            loss.left_out[NO_ARRIVAL] += 1
        else:
            yield record
