"""Texts of the gaps between an engine's steps, as JSON has them. mypyc compiles this module."""

from typing import Final

from librt.strings import BytesWriter
from librt.vecs import vec
from mypy_extensions import i64, u8

from measure.cache.hashtable import BoxedVec, repeated_byte

DECIMALS: Final = 4
"""Of times in ms: finer than any clock that a prediction will be compared with."""
PARTS_PER_MS: Final = 10_000
ROUNDER: Final = 6755399441055744.0
"""1.5 × 2⁵²: a float has no room for a fraction beside it, so adding it rounds to the nearest whole, half to even."""
ZERO: Final = 48
POINT: Final = 46
COMMA: Final = 44
OPEN: Final = 91
CLOSE: Final = 93


class GapTexts:
    """Texts of the gaps between steps; ``boxed_seen_ms``: when clients see each step's tokens, ascending."""

    def __init__(self, boxed_seen_ms: BoxedVec) -> None:
        seen_ms: vec[float] = boxed_seen_ms
        writer = BytesWriter()
        ends = repeated_byte(b"\0", len(seen_ms) + 1)
        for step in range(1, len(seen_ms)):
            write_gap(writer, seen_ms[step] - seen_ms[step - 1])
            ends[step] = len(writer)
        self._seen_ms: vec[float] = seen_ms
        self._text: bytes = writer.getvalue()
        self._ends: vec[i64] = ends
        """Text of gap i, between step i and the next, and a comma: from ``ends[i]`` to ``ends[i + 1]``."""

    def array(self, boxed_runs: BoxedVec) -> bytes:
        """Return the gaps between the tokens of one request as a JSON array.

        ``boxed_runs``: first step and number of consecutive steps, each with a token, again and again.
        """
        runs: vec[i64] = boxed_runs
        writer = BytesWriter()
        writer.append(OPEN)
        before: i64 = -1
        for index in range(0, len(runs), 2):
            first = runs[index]
            if before >= 0:
                write_gap(writer, self._seen_ms[first] - self._seen_ms[before])
            before = first + runs[index + 1] - 1
            writer.write(self._text[self._ends[first] : self._ends[before]])
        if len(writer) == 1:
            return b"[]"
        writer[len(writer) - 1] = CLOSE
        return writer.getvalue()


def write_gap(writer: BytesWriter, gap_ms: float) -> None:
    """Write a gap in ms, rounded, and a comma."""
    parts = i64(gap_ms * PARTS_PER_MS + ROUNDER - ROUNDER)
    write_digits(writer, parts // PARTS_PER_MS)
    writer.append(POINT)
    tenths, rest = parts // 1000 % 10, parts % 1000
    writer.append(u8(ZERO + tenths))
    if rest:
        writer.append(u8(ZERO + rest // 100))
    if rest % 100:
        writer.append(u8(ZERO + rest // 10 % 10))
    if rest % 10:
        writer.append(u8(ZERO + rest % 10))
    writer.append(COMMA)


def write_digits(writer: BytesWriter, number: i64) -> None:
    """Write a whole number."""
    if number >= 10:
        write_digits(writer, number // 10)
    writer.append(u8(ZERO + number % 10))
