"""A simulated run as a trace: the same requests under the same ids, with predicted times and cached tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from sim.engine import Flight, Simulation
from tracefile.schema import Record, Status

_DECIMALS = 4  # 0.1 µs: finer than any clock that a prediction will be compared with
_FAILURES = {"unservable": "exceeds_engine", "parent_failed": "parent_failed"}


def predicted_records(simulation: Simulation, *, keep_hashes: bool = True) -> list[Record]:
    """One record per flight, in order of their ends. ``concurrency`` is counted anew from the predicted times."""
    flights = [flight for flight in simulation.flights if flight.outcome is not None]
    concurrency = _concurrency(flights)
    records = [_record(flight, concurrency[place], keep_hashes=keep_hashes) for place, flight in enumerate(flights)]
    return sorted(records, key=lambda record: record.end_ms() or record.arrival_ms or 0.0)


def _record(flight: Flight, concurrency: int, *, keep_hashes: bool) -> Record:
    recorded = flight.arrival.record
    shape = msgspec.structs.replace(
        recorded,
        arrival_ms=round(flight.arrival_ms, _DECIMALS),
        scheduled_ms=None,
        first_byte_ms=None,
        ttft_ms=None,
        itl_ms=[],
        itl_tokens=[],
        e2e_ms=None if flight.e2e_ms is None else round(flight.e2e_ms, _DECIMALS),
        output_tokens=None,
        cached_tokens=None,
        concurrency=concurrency,
        think_ms=recorded.think_ms if flight.arrival.parent is None else flight.arrival.think_ms,
        extra={},
    )
    if not keep_hashes:
        shape = msgspec.structs.replace(shape, block_hashes=None, output_block_hashes=None, hash_source=None)
    if flight.outcome == "as_recorded":
        return shape
    if flight.request is None:
        return msgspec.structs.replace(
            shape, status="error", error=_FAILURES[flight.outcome or ""], http_status=None, finish_reason=None
        )
    return _ran(flight, shape)


def _ran(flight: Flight, shape: Record) -> Record:
    assert flight.request is not None
    recorded = flight.arrival.record
    aborted = flight.outcome == "aborted"
    status: Status = recorded.status if aborted else "ok"
    streamed = recorded.stream is not False and flight.ttft_ms is not None
    return msgspec.structs.replace(
        shape,
        status=status,
        http_status=recorded.http_status if aborted else 200,
        error=recorded.error if aborted else None,
        finish_reason=None if aborted else (recorded.finish_reason or "length"),
        ttft_ms=round(flight.ttft_ms, _DECIMALS) if streamed and flight.ttft_ms is not None else None,
        itl_ms=np.round(flight.itl_ms, _DECIMALS).tolist() if streamed else [],
        itl_tokens=[1] * len(flight.itl_ms) if streamed else [],
        output_tokens=len(flight.token_steps),
        cached_tokens=flight.request.cached_tokens,
    )


def _concurrency(flights: Sequence[Flight]) -> list[int]:
    """Requests in flight at each one's arrival, itself included."""
    arrivals = np.array([flight.arrival_ms for flight in flights])
    ends = arrivals + np.array([flight.e2e_ms or 0.0 for flight in flights])
    arrived = np.searchsorted(np.sort(arrivals), arrivals, side="right")
    gone = np.searchsorted(np.sort(ends), arrivals, side="right")
    return [max(1, int(count)) for count in arrived - gone]


@dataclass(frozen=True, slots=True)
class CohortSummary:
    """TTFT of a cohort's requests that got a first token, ms."""

    name: str
    requests: int
    p50_ms: float
    p90_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A predicted trace in a few lines."""

    requests: int
    not_ok: int
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    steps: int
    cohorts: list[CohortSummary]

    @property
    def hit_rate(self) -> float:
        """Cached share of the prompt tokens of the requests that ran."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def summarize(simulation: Simulation, records: Sequence[Record]) -> Summary:
    """Count ``records``, and their TTFT for all, for turn 1 and for later turns."""
    ran = [record for record in records if record.cached_tokens is not None]
    cohorts = {
        "all": records,
        "turn 1": [record for record in records if record.turn == 1],
        "turns 2+": [record for record in records if record.turn is not None and record.turn > 1],
    }
    return Summary(
        requests=len(records),
        not_ok=sum(record.status != "ok" for record in records),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in ran),
        cached_tokens=sum(record.cached_tokens or 0 for record in ran),
        preemptions=simulation.preemptions,
        steps=simulation.timeline.engine_steps,
        cohorts=[summary for name, members in cohorts.items() if (summary := _cohort(name, members)) is not None],
    )


def _cohort(name: str, records: Sequence[Record]) -> CohortSummary | None:
    ttfts = [record.ttft_ms for record in records if record.ttft_ms is not None]
    if not ttfts:
        return None
    p50, p90, p99 = (float(value) for value in np.quantile(ttfts, [0.5, 0.9, 0.99]))
    return CohortSummary(name, len(ttfts), p50, p90, p99)
