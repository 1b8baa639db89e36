"""Gaps between tokens as JSON: requests that decode in the same steps have the same gaps, so each is written once."""

from collections.abc import Sequence

import msgspec
import numpy as np

from tracefile.records.arrays import FloatArray, IntArray

DECIMALS = 4
"""Of times in ms: finer than any clock that a prediction will be compared with."""
STEPS_AT_ONCE = 1 << 16
_COMMA = ord(",")


class GapTexts:
    """Texts of the gaps between steps; ``seen_ms``: when clients see each step's tokens, ascending."""

    def __init__(self, seen_ms: FloatArray) -> None:
        self._seen_ms = seen_ms
        parts = [_texts(seen_ms[first : first + STEPS_AT_ONCE + 1]) for first in range(0, len(seen_ms), STEPS_AT_ONCE)]
        self._text = b"".join(text for text, _ in parts)
        starts = np.cumsum([0, *(len(text) for text, _ in parts)])
        # Text of gap i, between step i and the next, and a comma: from ``ends[i]`` to ``ends[i + 1]``.
        self._ends: list[int] = [0]
        for start, (_, ends) in zip(starts.tolist(), parts, strict=False):
            self._ends += (start + ends).tolist()

    def array(self, runs: Sequence[int]) -> msgspec.Raw:
        """Return the gaps between the tokens of one request as a JSON array.

        ``runs``: first step and number of consecutive steps, each with a token, again and again.
        """
        parts: list[bytes] = []
        before = -1
        for first, count in zip(runs[::2], runs[1::2], strict=True):
            if before >= 0:
                parts.append(_texts(self._seen_ms[[before, first]])[0])
            before = first + count - 1
            parts.append(self._text[self._ends[first] : self._ends[before]])
        return msgspec.Raw(b"[" + b"".join(parts)[:-1] + b"]")


def _texts(seen_ms: FloatArray) -> tuple[bytes, IntArray]:
    """Return the texts of the gaps, each with a comma behind it, and where each ends."""
    scale = 10.0**DECIMALS
    gaps_ms: list[float] = (np.rint(np.diff(seen_ms) * scale) / scale).tolist()
    text = msgspec.json.encode(gaps_ms)[1:-1] + b"," * bool(gaps_ms)
    return text, np.flatnonzero(np.frombuffer(text, np.uint8) == _COMMA) + 1
