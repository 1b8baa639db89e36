"""Gaps between token times (ITL) as JSON text, precomputed per scheduler step. mypyc compiles this module."""

from typing import Final

from librt.strings import BytesWriter
from librt.vecs import vec
from mypy_extensions import i64, u8

from measure.cache.hashtable import BoxedVec, repeated_byte

DECIMALS: Final = 4
"""Decimals of times in ms: finer than any clock that a prediction is compared with."""
PARTS_PER_MS: Final = 10_000
ROUNDER: Final = 6755399441055744.0
"""1.5 × 2⁵²: a float of this size has no fraction bits, so adding it rounds to the nearest integer, half to even."""
ZERO: Final = 48
POINT: Final = 46
COMMA: Final = 44
OPEN: Final = 91
CLOSE: Final = 93


class GapTexts:
    """JSON text of the gaps between steps. ``boxed_delivered_ms``: delivery time of each step's tokens, ascending."""

    def __init__(self, boxed_delivered_ms: BoxedVec) -> None:
        delivered_ms: vec[float] = boxed_delivered_ms
        writer = BytesWriter()
        ends = repeated_byte(b"\0", len(delivered_ms) + 1)
        for step in range(1, len(delivered_ms)):
            write_gap(writer, delivered_ms[step] - delivered_ms[step - 1])
            ends[step] = len(writer)
        self._delivered_ms: vec[float] = delivered_ms
        self._text: bytes = writer.getvalue()
        self._ends: vec[i64] = ends
        """Text of the gap from step i to the next, with a comma: from ``ends[i]`` to ``ends[i + 1]``."""

    def array(self, boxed_runs: BoxedVec) -> bytes:
        """Return the gaps between a request's tokens (ITL, in ms) as a JSON array.

        ``boxed_runs``: pairs of first step and number of consecutive steps with a token each.
        """
        runs: vec[i64] = boxed_runs
        writer = BytesWriter()
        writer.append(OPEN)
        before: i64 = -1
        for index in range(0, len(runs), 2):
            first = runs[index]
            if before >= 0:
                write_gap(writer, self._delivered_ms[first] - self._delivered_ms[before])
            before = first + runs[index + 1] - 1
            writer.write(self._text[self._ends[first] : self._ends[before]])
        if len(writer) == 1:
            return b"[]"
        writer[len(writer) - 1] = CLOSE
        return writer.getvalue()


def write_gap(writer: BytesWriter, gap_ms: float) -> None:
    """Write a rounded gap between tokens, in ms, and a comma."""
    parts = i64(gap_ms * PARTS_PER_MS + ROUNDER - ROUNDER)
    write_digits(writer, parts // PARTS_PER_MS)
    writer.append(POINT)
    tenths, thousandths = parts // 1000 % 10, parts % 1000
    writer.append(u8(ZERO + tenths))
    if thousandths:
        writer.append(u8(ZERO + thousandths // 100))
    if thousandths % 100:
        writer.append(u8(ZERO + thousandths // 10 % 10))
    if thousandths % 10:
        writer.append(u8(ZERO + thousandths % 10))
    writer.append(COMMA)


def write_digits(writer: BytesWriter, number: i64) -> None:
    if number >= 10:
        write_digits(writer, number // 10)
    writer.append(u8(ZERO + number % 10))
