"""What became of a request, whichever engine ran it: what a predicted record is made of."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from sim.engine.engine import Flight
from sim.kernels import layout
from sim.kernels.layout import World
from sim.kernels.text import MOST_DIGITS, write_arrays
from sim.workload.arrivals import Arrivals
from sim.workload.interning import Int64Array
from tracefile.records.schema import Record

DECIMALS = 4
"""Of times in ms: finer than any clock that a prediction will be compared with."""
_GAPS_AT_ONCE = 1 << 18

_OUTCOMES = [outcome or "" for outcome in layout.OUTCOMES]

Gaps = list[float] | msgspec.Raw


@dataclass(slots=True)
class Ending:
    """One request's end. Times in ms, not rounded but for ``itl_ms``."""

    record: Record
    """As recorded; whoever has the ending may change it."""
    number: int
    """Its place in the whole workload."""
    think_ms: float | None
    """None: it did not wait for another's end."""
    prompt_tokens: int
    outcome: str
    arrival_ms: float
    ttft_ms: float | None
    itl_ms: Gaps
    """Rounded; as JSON where it is only to be written."""
    output_tokens: int
    e2e_ms: float | None
    reached: bool
    """The engine got it."""
    cached_tokens: int | None
    queue_ms: float | None
    """In the scheduler's queue before the first step that served it."""
    preemptions: int


def ending_of(flight: Flight, number: int) -> Ending:
    """That of a plain flight that has one, and its place."""
    assert flight.outcome is not None
    request, entry_ms, admitted_ms = flight.request, flight.entry_ms, flight.admitted_ms
    return Ending(
        copy.copy(flight.arrival.record),
        number,
        None if flight.arrival.parent is None else flight.arrival.think_ms,
        flight.arrival.prompt_tokens,
        flight.outcome,
        flight.arrival_ms,
        flight.ttft_ms,
        np.round(flight.itl_ms, DECIMALS).tolist(),
        len(flight.token_steps),
        flight.e2e_ms,
        request is not None,
        None if request is None else request.cached_tokens,
        None if entry_ms is None or admitted_ms is None else admitted_ms - entry_ms,
        0 if request is None else request.preemptions,
    )


def endings_in(world: World, arrivals: Arrivals, places: Int64Array) -> Iterator[Ending]:
    """Those of the flights at ``places``, all of which have ended; a few thousand are made at once."""
    counts = np.maximum(world.flights["num_seen"][places] - 1, 0)
    cuts = np.searchsorted(np.cumsum(counts), np.arange(_GAPS_AT_ONCE, int(counts.sum()), _GAPS_AT_ONCE))
    for some in np.split(places, np.unique(cuts)):
        yield from _endings(world, arrivals, some)


def _endings(world: World, arrivals: Arrivals, places: Int64Array) -> Iterator[Ending]:
    flights, requests = world.flights[places], world.scheduler.requests[places]
    return map(
        Ending,
        arrivals.records(places),
        arrivals.numbers[places].tolist(),
        _or_none(arrivals.think_ms[places]),
        arrivals.prompt_tokens[places].tolist(),
        map(_OUTCOMES.__getitem__, flights["outcome"].tolist()),
        flights["arrival_ms"].tolist(),
        _or_none(flights["ttft_ms"]),
        _gap_texts(world, places),
        flights["num_seen"].tolist(),
        _or_none(flights["e2e_ms"]),
        (requests["state"] != layout.ABSENT).tolist(),
        [None if tokens < 0 else tokens for tokens in requests["cached_tokens"].tolist()],
        _or_none(flights["admitted_ms"] - flights["entry_ms"]),
        requests["preemptions"].tolist(),
    )


def _gap_texts(world: World, places: Int64Array) -> Iterator[msgspec.Raw]:
    counts = np.maximum(world.flights["num_seen"][places] - 1, 0)
    text = np.empty(int(counts.sum()) * MOST_DIGITS + 2 * len(places), np.uint8)
    ends = np.empty(len(places), np.int64)
    write_arrays(world.itl_ms, world.flights["first_token"][places] + 1, counts, text, ends)
    view, start = memoryview(text.data), 0
    for end in ends.tolist():
        yield msgspec.Raw(view[start:end])
        start = end


def _or_none(times_ms: layout.Floats) -> list[float | None]:
    known: list[float | None] = times_ms.tolist()
    for place in np.flatnonzero(np.isnan(times_ms)).tolist():
        known[place] = None
    return known
