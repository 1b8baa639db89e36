"""Arrival times of sessions in whole microseconds from t = 0, in order, generated lazily.

Arrivals are spaced in units of their expected number, in whole millionths, and a rate gives their times: with a rate
that changes this is the exact process, not an approximation in steps.
"""

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.core.draws import Stream, draw_each
from loadgen.core.lengths import standard_normal, uniform
from tracefile import InputError
from tracefile.records.decoding import NOT_JSON
from tracefile.storage.lines import LineReader

Counts = npt.NDArray[np.int64]
Positions = npt.NDArray[np.uint64]
Chunks = Iterator[Counts]

CHUNK = 1024
MOST_ATTEMPTS = 1000
SECOND_US = 1_000_000
Floats = npt.NDArray[np.float64]

PARTS = 1_000_000
"""Parts of an arrival: expected arrivals are counted in whole millionths."""
EXPECTED = "t_s and rate, both numbers of 0 or more, times in order"
COLUMNS = ("t_s", "rate")


@dataclass(frozen=True, slots=True)
class RateProfile:
    """Pieces in order of time; the last one never ends."""

    starts_s: Floats
    rates: Floats
    """Arrivals a second where each piece starts."""
    slopes: Floats
    """Change of the rate, a second."""
    expected: Floats
    """Arrivals expected before each piece."""

    def times_us(self, counts: Counts) -> Counts:
        """Return the times when ``counts`` millionths of arrivals are expected; omit counts that are never reached."""
        wanted = counts / PARTS
        piece = np.searchsorted(self.expected, wanted, side="right") - 1
        rate, slope, beyond = self.rates[piece], self.slopes[piece], wanted - self.expected[piece]
        # The root of slope/2·t² + rate·t = beyond, in the form that does not cancel; 0/0 where nothing is beyond.
        over = rate + np.sqrt(np.maximum(rate * rate + 2 * slope * beyond, 0.0))
        ever = (over > 0) | (beyond == 0)
        after = np.divide(2 * beyond, over, out=np.zeros_like(beyond), where=over > 0)
        times_us: Counts = np.rint((self.starts_s[piece] + after)[ever] * 1e6).astype(np.int64)
        return times_us


def flat(rate_per_s: float) -> RateProfile:
    return profile([(0.0, rate_per_s)])


def ramp(start_per_s: float, end_per_s: float, seconds: float) -> RateProfile:
    return profile([(0.0, start_per_s), (seconds, end_per_s)])


def staircase(start_per_s: float, end_per_s: float, steps: int, step_s: float) -> RateProfile:
    climb = (end_per_s - start_per_s) / (steps - 1)
    return stepped([(step * step_s, start_per_s + step * climb) for step in range(steps)])


def stepped(points: Sequence[tuple[float, float]]) -> RateProfile:
    corners = [(time, rate) for (start, rate), (end, _) in pairwise(points) for time in (start, end)]
    return profile([*corners, points[-1]])


def profile(points: Sequence[tuple[float, float]]) -> RateProfile:
    """A straight line from each (time, rate) to the next; no arrivals before the first, the last rate after it."""
    times = np.array([0.0, points[0][0], *(time for time, _ in points)])
    rates = np.array([0.0, 0.0, *(rate for _, rate in points)])
    lengths = np.diff(times)
    slopes = np.divide(np.diff(rates), lengths, out=np.zeros_like(lengths), where=lengths > 0)
    expected = np.concatenate([[0.0], np.cumsum((rates[:-1] + rates[1:]) / 2 * lengths)])
    return RateProfile(times, rates, np.append(slopes, 0.0), expected)


class RatePoint(msgspec.Struct):
    """Point of a rate series."""

    t_s: float
    rate: float


def read_rate_series(path: Path) -> tuple[tuple[float, float], ...]:
    points: list[tuple[float, float]] = []
    with LineReader(path, expected=f"CSV or JSONL with columns {' and '.join(COLUMNS)}") as lines:
        for where, found in _rows(path, lines):
            try:
                point = msgspec.convert(found, RatePoint, strict=False)
            except msgspec.ValidationError as error:
                raise InputError(f"{where}: {error}; expected {EXPECTED}") from None
            late = bool(points) and point.t_s <= points[-1][0]
            if not (0 <= point.t_s < math.inf and 0 <= point.rate < math.inf) or late:
                raise InputError(f"{where}: t_s {point.t_s:g}, rate {point.rate:g}; expected {EXPECTED}")
            points.append((point.t_s, point.rate))
    if not any(rate for _, rate in points):
        raise InputError(f"{path}: no rate above 0; expected {EXPECTED}")
    if points[-1][0] == 0:
        raise InputError(f"{path}: one point at 0; expected where the series ends, too, or --rate")
    return tuple(points)


def _rows(path: Path, lines: LineReader) -> Iterator[tuple[str, Any]]:
    header: list[str] | None = None
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
    """The same distance between any two, the first at 0."""
    return (np.arange(start, start + CHUNK, dtype=np.int64) * PARTS for start in count(0, CHUNK))


def exponentially(seed: int) -> Chunks:
    """Independent exponential distances, the first one before the first arrival: a Poisson process."""
    return _added(lambda positions: -np.log(uniform(draw_each(seed, Stream.ARRIVAL_GAP, positions))))


def gamma_spaced(seed: int, burstiness: float) -> Chunks:
    """Independent gamma distances of shape ``burstiness``: deviation over mean is 1/√burstiness; 1: Poisson."""
    return _added(lambda positions: gamma(seed, positions, burstiness) / burstiness)


def at_rate(spaced: Chunks, profile: RateProfile) -> Chunks:
    for counts in spaced:
        times_us = profile.times_us(counts)
        if len(times_us):
            yield times_us
        if len(times_us) < len(counts):
            return


def bursts(size: int, every_s: float) -> Chunks:
    """``size`` at once, every ``every_s`` seconds, the first at 0."""
    for start in count(0, CHUNK):
        turns = np.arange(start, start + CHUNK, dtype=np.int64) // size
        yield np.rint(turns * (every_s * SECOND_US)).astype(np.int64)


def before(chunks: Chunks, number: int | None, seconds: float | None) -> Chunks:
    """The first ``number`` arrivals before ``seconds``; null: no such bound."""
    left = number
    end_us = None if seconds is None else round(seconds * SECOND_US)
    for chunk in chunks:
        kept = chunk[:left] if end_us is None else chunk[:left][chunk[:left] < end_us]
        yield kept
        left = None if left is None else left - len(kept)
        if len(kept) < len(chunk) or left == 0:
            return


def gamma(seed: int, positions: Positions, shape: float) -> npt.NDArray[np.float64]:
    """Gamma numbers of this shape and scale 1, each a function of its position (Marsaglia and Tsang, 2000)."""
    if shape < 1:
        boost = uniform(draw_each(seed, Stream.ARRIVAL_BOOST, positions))
        return gamma(seed, positions, shape + 1) * np.power(boost, 1 / shape)
    d = shape - 1 / 3
    c = 1 / np.sqrt(9 * d)
    drawn = np.full(len(positions), d)
    waiting = np.arange(len(positions))
    for attempt in range(MOST_ATTEMPTS):
        at, try_ = positions[waiting], np.array([attempt], dtype=np.uint64)
        x = standard_normal(draw_each(seed, Stream.ARRIVAL_GAP, at, try_))
        u = uniform(draw_each(seed, Stream.ARRIVAL_ACCEPTANCE, at, try_))
        v = np.maximum(1 + c * x, 0.0) ** 3
        with np.errstate(divide="ignore"):
            taken = (v > 0) & (np.log(u) < x * x / 2 + d - d * v + d * np.log(v))
        drawn[waiting[taken]] = d * v[taken]
        waiting = waiting[~taken]
        if not len(waiting):
            break
    return drawn


def _added(distances: Callable[[Positions], npt.NDArray[np.float64]]) -> Chunks:
    """Cumulative distances, each rounded to a whole millionth first: sums of floats would drift apart."""
    reached = 0
    for start in count(0, CHUNK):
        gaps = np.rint(distances(np.arange(start, start + CHUNK, dtype=np.uint64)) * PARTS).astype(np.int64)
        added = np.cumsum(gaps) + reached
        reached = int(added[-1])
        yield added
