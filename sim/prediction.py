"""A simulated run as a trace: the same requests under the same ids, with predicted times and cached tokens."""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec
import numpy as np

from sim.ending import DECIMALS, Ending, ending_of
from sim.engine import Simulation
from tracefile.schema import Record, Status

_FAILURES = {"unservable": "exceeds_engine", "parent_failed": "parent_failed"}


def predicted_records(simulation: Simulation, *, keep_hashes: bool = True) -> list[Record]:
    """One record per flight, in order of their ends. ``concurrency`` is counted anew from the predicted times."""
    order = FinishOrder()
    for flight in simulation.flights:
        if flight.outcome is not None:
            order.add(ending_of(flight), simulation.block_size, keep_hashes=keep_hashes)
    return order.release()


class FinishOrder:
    """Puts records in the order of their ends, as they become certain, and counts who was in flight at each arrival."""

    def __init__(self) -> None:
        self._held: list[tuple[float, float, Record]] = []
        """End and exact arrival of records that are not released."""
        self._spans_ms: list[tuple[float, float]] = []
        """Exact arrival and end of those that may have been in flight at the arrival of one yet to be released."""

    def add(self, ending: Ending, block_size: int, *, keep_hashes: bool = True) -> None:
        """Take the next in order of arrival, or of places in the trace."""
        record = _record(ending, block_size, keep_hashes=keep_hashes)
        end_ms = record.end_ms() or record.arrival_ms or 0.0
        self._held.append((end_ms, ending.arrival_ms, record))
        self._spans_ms.append((ending.arrival_ms, ending.arrival_ms + (ending.e2e_ms or 0.0)))

    def release(self, before_ms: float = float("inf")) -> list[Record]:
        """Those that ended before ``before_ms``, at which or later everything else arrives or ends."""
        ready = sorted((held for held in self._held if held[0] < before_ms), key=lambda held: held[0])
        self._held = [held for held in self._held if held[0] >= before_ms]
        spans_ms = np.array(self._spans_ms).reshape(-1, 2)
        arrivals_ms = np.array([arrival_ms for _, arrival_ms, _ in ready])
        arrived = np.searchsorted(np.sort(spans_ms[:, 0]), arrivals_ms, side="right")
        gone = np.searchsorted(np.sort(spans_ms[:, 1]), arrivals_ms, side="right")
        for (_, _, record), count in zip(ready, (arrived - gone).tolist(), strict=True):
            record.concurrency = max(1, count)
        oldest_ms = min((arrival_ms for _, arrival_ms, _ in self._held), default=before_ms)
        self._spans_ms = [span for span in self._spans_ms if span[1] > min(oldest_ms, before_ms)]
        return [record for _, _, record in ready]


def _record(ending: Ending, block_size: int, *, keep_hashes: bool) -> Record:
    recorded = ending.arrival.record
    changes: dict[str, object] = {
        "arrival_ms": round(ending.arrival_ms, DECIMALS),
        "scheduled_ms": None,
        "first_byte_ms": None,
        "ttft_ms": None,
        "itl_ms": [],
        "itl_tokens": [],
        "e2e_ms": None if ending.e2e_ms is None else round(ending.e2e_ms, DECIMALS),
        "output_tokens": None,
        "cached_tokens": None,
        "think_ms": recorded.think_ms if ending.arrival.parent is None else ending.arrival.think_ms,
        "extra": {},
    }
    if not keep_hashes:
        changes |= {"block_hashes": None, "output_block_hashes": None, "hash_source": None}
    if ending.outcome != "as_recorded":
        if ending.reached:
            changes |= _ran(ending, block_size)
        else:
            changes |= {
                "status": "error",
                "error": _FAILURES[ending.outcome],
                "http_status": None,
                "finish_reason": None,
            }
    return msgspec.structs.replace(recorded, **changes)


def _ran(ending: Ending, block_size: int) -> dict[str, object]:
    recorded, tokens = ending.arrival.record, ending.output_tokens
    aborted = ending.outcome == "aborted"
    status: Status = recorded.status if aborted else "ok"
    streamed = recorded.stream is not False and ending.ttft_ms is not None
    return {
        "status": status,
        "http_status": recorded.http_status if aborted else 200,
        "error": recorded.error if aborted else None,
        "finish_reason": None if aborted else (recorded.finish_reason or "length"),
        "ttft_ms": round(ending.ttft_ms, DECIMALS) if streamed and ending.ttft_ms is not None else None,
        "itl_ms": ending.itl_ms if streamed and tokens > 1 else [],
        "itl_tokens": _ones(ending.itl_ms, tokens - 1) if streamed and tokens > 1 else [],
        "output_tokens": tokens,
        "cached_tokens": ending.cached_tokens,
        "queue_ms": None if ending.queue_ms is None else round(ending.queue_ms, DECIMALS),
        "preemptions": ending.preemptions,
        "kv_blocks": None if aborted else -(-(ending.arrival.prompt_tokens + tokens - 1) // block_size),
    }


def _ones(gaps: list[float] | msgspec.Raw, count: int) -> list[int] | msgspec.Raw:
    """A token a read, in the form that the gaps are in."""
    return [1] * count if isinstance(gaps, list) else _ones_text(count)


@cache
def _ones_text(count: int) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b"1," * (count - 1) + b"1]")


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
    unservable: int
    """Those of ``not_ok`` that are too long for this engine."""
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    steps: int
    arrivals_ms: float
    """From the first arrival to the last."""
    drain_ms: float
    """From the last arrival to the last end."""
    cohorts: list[CohortSummary]

    @property
    def is_overrun(self) -> bool:
        """Whether the engine took longer, and more than a minute longer, to finish than the requests took to come: then
        they came faster than it serves them, and TTFTs say how long the trace is."""
        return self.drain_ms > max(self.arrivals_ms, 60_000.0)

    @property
    def hit_rate(self) -> float:
        """Cached share of the prompt tokens of the requests that ran."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Tally:
    """Counts predicted records as they are written."""

    def __init__(self) -> None:
        self._requests = self._not_ok = self._unservable = self._prompt_tokens = self._cached_tokens = 0
        self._first_ms, self._last_ms, self._end_ms = math.inf, -math.inf, -math.inf
        self._ttfts_ms = {name: array("d") for name in ("all", "turn 1", "turns 2+")}

    def add(self, records: Iterable[Record]) -> None:
        """Count ``records``."""
        for record in records:
            self._requests += 1
            self._not_ok += record.status != "ok"
            self._unservable += record.error == _FAILURES["unservable"]
            self._note_span(record.arrival_ms or 0.0, record.e2e_ms or 0.0)
            if record.cached_tokens is not None:
                self._prompt_tokens += record.prompt_tokens or 0
                self._cached_tokens += record.cached_tokens
            if record.ttft_ms is not None:
                self._ttfts_ms["all"].append(record.ttft_ms)
                if record.turn is not None:
                    self._ttfts_ms["turn 1" if record.turn == 1 else "turns 2+"].append(record.ttft_ms)

    def _note_span(self, arrival_ms: float, e2e_ms: float) -> None:
        self._first_ms = min(self._first_ms, arrival_ms)
        self._last_ms = max(self._last_ms, arrival_ms)
        self._end_ms = max(self._end_ms, arrival_ms + e2e_ms)

    def summary(self, preemptions: int, steps: int) -> Summary:
        """What was counted, and TTFT for all, for turn 1 and for later turns."""
        return Summary(
            requests=self._requests,
            not_ok=self._not_ok,
            unservable=self._unservable,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            preemptions=preemptions,
            steps=steps,
            arrivals_ms=self._last_ms - self._first_ms if self._requests else 0.0,
            drain_ms=self._end_ms - self._last_ms if self._requests else 0.0,
            cohorts=[_cohort(name, ttfts_ms) for name, ttfts_ms in self._ttfts_ms.items() if ttfts_ms],
        )


def _cohort(name: str, ttfts_ms: Sequence[float]) -> CohortSummary:
    p50, p90, p99 = (float(value) for value in np.quantile(ttfts_ms, [0.5, 0.9, 0.99]))
    return CohortSummary(name, len(ttfts_ms), p50, p90, p99)
