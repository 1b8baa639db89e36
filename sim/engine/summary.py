"""Summary of a predicted trace: counts, and TTFT by cohort."""

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from measure.quantiles import quantile_place
from measure.survival import END_OF_STATUS, EVENT, incidence, make_waits, quantiles
from sim.engine.results import FAILURES
from tracefile.records.schema import Record

_LEVELS = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class CohortSummary:
    """TTFT of a cohort's requests, ms; aborts before a first token are censored. None: past the last first token."""

    name: str
    requests: int
    """Requests that waited for a first token."""
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A predicted trace in a few lines."""

    requests: int
    not_ok: int
    unservable: int
    """Part of ``not_ok``: requests too long for this engine."""
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
        """True if the engine needs longer to finish than the arrivals took, and longer than a minute.

        Arrivals then exceed its capacity, and TTFT depends on the length of the trace."""
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
        self._waits_ms = {name: array("d") for name in ("all", "turn 1", "turns 2+")}
        self._ends = {name: array("b") for name in self._waits_ms}

    def add(self, records: Iterable[Record]) -> None:
        """Count ``records``."""
        for record in records:
            self._requests += 1
            self._not_ok += record.status != "ok"
            self._unservable += record.error == FAILURES["unservable"]
            self._note_span(record.arrival_ms or 0.0, record.e2e_ms or 0.0)
            if record.cached_tokens is not None:
                self._prompt_tokens += record.prompt_tokens or 0
                self._cached_tokens += record.cached_tokens
            self._note_wait(record)

    def _note_wait(self, record: Record) -> None:
        end = EVENT if record.ttft_ms is not None else END_OF_STATUS[record.status]
        wait_ms = record.e2e_ms if record.ttft_ms is None else record.ttft_ms
        if wait_ms is None or (record.ttft_ms is None and end == EVENT):  # not streamed: there was no wait
            return
        turn = () if record.turn is None else ("turn 1" if record.turn == 1 else "turns 2+",)
        for name in ("all", *turn):
            self._waits_ms[name].append(wait_ms)
            self._ends[name].append(end)

    def _note_span(self, arrival_ms: float, e2e_ms: float) -> None:
        self._first_ms = min(self._first_ms, arrival_ms)
        self._last_ms = max(self._last_ms, arrival_ms)
        self._end_ms = max(self._end_ms, arrival_ms + e2e_ms)

    def summary(self, preemptions: int, steps: int) -> Summary:
        """Summarize the counted records: totals, and TTFT of all, of turn 1 and of later turns."""
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
            cohorts=[
                _cohort(name, waits_ms, self._ends[name]) for name, waits_ms in self._waits_ms.items() if waits_ms
            ],
        )


def _cohort(name: str, waits_ms: "array[float]", ends: "array[int]") -> CohortSummary:
    times_ms, end = np.array(waits_ms), np.array(ends, dtype=np.int8)
    if end.any():
        waits = make_waits(times_ms, end, np.arange(len(times_ms)))
        found = quantiles(waits, incidence(waits), np.array(_LEVELS)).tolist()
    else:
        places = [quantile_place(level, len(times_ms)) for level in _LEVELS]
        found = np.partition(times_ms, places)[places].tolist()
    p50, p90, p99 = (value if math.isfinite(value) else None for value in found)
    return CohortSummary(name, len(times_ms), p50, p90, p99)
