"""When load arrives: constant and poisson, as whole microseconds from t = 0. Each pattern is one function."""

from collections.abc import Iterator
from itertools import count, islice, takewhile

from loadgen.draws import Stream, draw, exponential_us

SECOND_US = 1_000_000


def constant_us(rate_per_s: float) -> Iterator[int]:
    """Arrivals at equal distances, the first at 0."""
    return (round(index * SECOND_US / rate_per_s) for index in count())


def poisson_us(rate_per_s: float, seed: int) -> Iterator[int]:
    """Arrivals with independent exponential gaps, the first one gap after 0."""
    at_us = 0
    for index in count():
        at_us += exponential_us(draw(seed, Stream.ARRIVAL_GAP, index), SECOND_US / rate_per_s)
        yield at_us


def bounded_us(arrivals_us: Iterator[int], number: int | None, duration_s: float | None) -> list[int]:
    """The first ``number`` arrivals before ``duration_s``; null: no such bound (one of the two must be there)."""
    if duration_s is not None:
        arrivals_us = takewhile(lambda at_us: at_us < duration_s * SECOND_US, arrivals_us)
    return list(islice(arrivals_us, number))
