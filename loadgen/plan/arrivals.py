"""When load arrives, as whole microseconds from t = 0, in order, made as it is asked for: plans may be endless.

Arrivals are spaced in units of their expected number (evenly, exponentially, by a gamma distribution), in whole
millionths, and a rate says when so many are expected: with a rate that changes this is the exact process, not an
approximation in steps. Each way of spacing is one function.
"""

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import numpy.typing as npt

from loadgen.core.draws import Stream, draw_each
from loadgen.core.spans import standard_normal, uniform
from loadgen.plan.rates import PARTS, RateProfile

Counts = npt.NDArray[np.int64]
Positions = npt.NDArray[np.uint64]
Chunks = Iterator[Counts]

CHUNK = 1024
MOST_ATTEMPTS = 1000
SECOND_US = 1_000_000


def evenly() -> Chunks:
    """The same distance between any two, the first at 0."""
    return (np.arange(start, start + CHUNK, dtype=np.int64) * PARTS for start in count(0, CHUNK))


def exponentially(seed: int) -> Chunks:
    """Independent exponential distances, the first one before the first arrival: a Poisson process."""
    return _added(lambda positions: -np.log(uniform(draw_each(seed, Stream.ARRIVAL_GAP, positions))))


def gamma_spaced(seed: int, burstiness: float) -> Chunks:
    """Independent gamma distances of shape ``burstiness``: below 1 in bursts, 1 a Poisson process, above 1 more even.

    Their deviation over their mean is 1/√burstiness.
    """
    return _added(lambda positions: gamma(seed, positions, burstiness) / burstiness)


def at_rate(spaced: Chunks, profile: RateProfile) -> Chunks:
    """Spaced arrivals at their times."""
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
    """Gamma numbers of this shape and scale 1, each a function of its position (Marsaglia and Tsang, 2000).

    A shape below 1 is had from the one above it by a power of another uniform number.
    """
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
    """Distances by position added up, each rounded to a whole millionth first: sums of floats would drift apart."""
    reached = 0
    for start in count(0, CHUNK):
        gaps = np.rint(distances(np.arange(start, start + CHUNK, dtype=np.uint64)) * PARTS).astype(np.int64)
        added = np.cumsum(gaps) + reached
        reached = int(added[-1])
        yield added
