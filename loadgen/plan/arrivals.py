"""Arrival times of sessions in whole microseconds from t = 0, in order, generated lazily.

Arrivals are spaced in units of their expected number, in whole millionths; a rate profile converts them to times: with
a changing rate this is the exact process, not an approximation in steps.
"""

import csv
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.core.draws import Stream, draw_array
from loadgen.core.lengthdraws import uniform
from tracefile.records.decoding import NOT_JSON
from tracefile.records.errors import InputError
from tracefile.storage.lines import LineReader

Counts = npt.NDArray[np.int64]
Positions = npt.NDArray[np.uint64]
Chunks = Iterator[Counts]

CHUNK = 1024
SECOND_US = 1_000_000
Floats = npt.NDArray[np.float64]

PARTS = 1_000_000
"""Expected arrivals are counted in whole millionths."""
EXPECTED = "t_s and rate, both numbers of 0 or more, times in order"
COLUMNS = ("t_s", "rate")
INLINE = re.compile(r"[\d.]+:[\d.]+(?:,[\d.]+:[\d.]+)*")


@dataclass(frozen=True, slots=True)
class RateProfile:
    """Piecewise constant arrival rate: each rate holds until the next, the last without end."""

    starts_s: Floats
    rates: Floats
    expected: Floats
    """Expected arrivals before each rate begins."""

    def times_us(self, counts: Counts) -> Counts:
        """Return the times at which ``counts`` millionths of arrivals are expected, without counts never reached."""
        expected = counts / PARTS
        piece = np.searchsorted(self.expected, expected, side="right") - 1
        rate, excess = self.rates[piece], expected - self.expected[piece]
        after = np.divide(excess, rate, out=np.zeros_like(excess), where=rate > 0)
        reached = (rate > 0) | (excess == 0)
        times_us: Counts = np.rint((self.starts_s[piece] + after)[reached] * 1e6).astype(np.int64)
        return times_us


def rate_profile(points: Sequence[tuple[float, float]]) -> RateProfile:
    """Arrival rates from each (time, rate) on; no arrivals before the first."""
    starts = np.array([0.0, *(time for time, _ in points)])
    rates = np.array([0.0, *(rate for _, rate in points)])
    expected = np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(starts))])
    return RateProfile(starts, rates, expected)


class RatePoint(msgspec.Struct):
    """Point of a rate series."""

    t_s: float
    rate: float


def read_rate_series(text: str) -> tuple[tuple[float, float], ...]:
    """Return (seconds, rate) in order of time, from ``T:R,T:R…`` or a file's path. Raises InputError."""
    points: list[tuple[float, float]] = []
    for where, row in _inline(text) if INLINE.fullmatch(text) else _rows(Path(text)):
        try:
            point = msgspec.convert(row, RatePoint, strict=False)
        except msgspec.ValidationError as error:
            raise InputError(f"{where}: {error}; expected {EXPECTED}") from None
        late = bool(points) and point.t_s <= points[-1][0]
        if not (0 <= point.t_s < math.inf and 0 <= point.rate < math.inf) or late:
            raise InputError(f"{where}: t_s {point.t_s:g}, rate {point.rate:g}; expected {EXPECTED}")
        points.append((point.t_s, point.rate))
    if not any(rate for _, rate in points):
        raise InputError(f"--rate-series: {text}: no rate above 0; expected {EXPECTED}")
    if points[-1][0] == 0:
        raise InputError(f"--rate-series: {text}: one point at 0; expected where the series ends, too, or --rate")
    return tuple(points)


def _inline(text: str) -> Iterator[tuple[str, Any]]:
    for pair in text.split(","):
        yield f"--rate-series: {pair}", dict(zip(COLUMNS, pair.split(":"), strict=True))


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    header: list[str] | None = None
    with LineReader(path, expected=f"CSV or JSONL with columns {' and '.join(COLUMNS)}") as lines:
        for line in lines:
            where = f"{path}:{lines.number}"
            if line.lstrip().startswith(b"{"):
                try:
                    yield where, msgspec.json.decode(line)
                except NOT_JSON as error:
                    raise InputError(f"{where}: {error}; expected {EXPECTED}") from None
                continue
            cells = [cell.strip() for cell in next(csv.reader([line.decode("utf-8-sig", "replace")]))]
            if header is not None:
                yield where, dict(zip(header, cells, strict=False))
            elif not set(COLUMNS) <= set(cells):
                raise InputError(f"{where}: columns {', '.join(cells)}; expected {' and '.join(COLUMNS)}")
            else:
                header = cells


def evenly() -> Chunks:
    """Equal gaps between arrivals, the first at 0."""
    return (np.arange(start, start + CHUNK, dtype=np.int64) * PARTS for start in count(0, CHUNK))


def exponentially(seed: int) -> Chunks:
    """Independent exponential gaps, also before the first arrival: a Poisson process."""
    return _accumulated(lambda positions: -np.log(uniform(draw_array(seed, Stream.ARRIVAL_GAP, positions))))


def at_rate(spaced: Chunks, profile: RateProfile) -> Chunks:
    for counts in spaced:
        times_us = profile.times_us(counts)
        if len(times_us):
            yield times_us
        if len(times_us) < len(counts):
            return


def before(chunks: Chunks, number: int | None, seconds: float | None) -> Chunks:
    """First ``number`` arrivals before ``seconds``; null: no bound."""
    left = number
    end_us = None if seconds is None else round(seconds * SECOND_US)
    for chunk in chunks:
        selected = chunk[:left] if end_us is None else chunk[:left][chunk[:left] < end_us]
        yield selected
        left = None if left is None else left - len(selected)
        if len(selected) < len(chunk) or left == 0:
            return


def _accumulated(gaps_at: Callable[[Positions], npt.NDArray[np.float64]]) -> Chunks:
    """Cumulative gaps, each rounded to a whole millionth first: sums of floats would drift."""
    total = 0
    for start in count(0, CHUNK):
        gaps = np.rint(gaps_at(np.arange(start, start + CHUNK, dtype=np.uint64)) * PARTS).astype(np.int64)
        arrivals = np.cumsum(gaps) + total
        total = int(arrivals[-1])
        yield arrivals
