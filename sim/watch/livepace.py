"""Pace of the last minutes, from one slice of time per judgement, and the alarm where it leaves the model's drift."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, hypot, log

import numpy as np

from measure.modelstate import LivePace
from measure.scores import ndtri, stdtrit
from sim.fit.drift import INTERVAL
from sim.fit.observations import Observations
from sim.fit.pace import Pace, measure_pace, priced_steps
from sim.fit.variants import Capture
from sim.latency.modelfile import Model
from sim.watch.window import Kept
from sim.workload.arrivals import plan_arrivals
from tracefile.records.schema import Meta, Record

MOST_READS = 1 << 18
"""Token reads in a slice: rebuilding the steps of more takes seconds. A slice of more is cut at its begin."""
SHORTEST_MS = 1000.0
LEAST = log(1.05)
"""Drift that is never told: forecasts' bands are wider."""
JUDGEMENTS = 3
"""In a row that say the same before the alarm changes."""


@dataclass(slots=True)
class Slices:
    """Seen steps of the slices within the last ``length_ms``."""

    length_ms: float
    _kept: deque[tuple[float, Observations]] = field(default_factory=deque)

    def add(self, until_ms: float, seen: Observations) -> None:
        if len(seen.seen_ms):
            self._kept.append((until_ms, seen))
        while self._kept and self._kept[0][0] <= until_ms - self.length_ms:
            self._kept.popleft()

    def pace(self, model: Model) -> Pace:
        """Return the pace of all. Raises InputError if they have too few steps."""
        parts = [seen for _, seen in self._kept] or [_NOTHING_SEEN]
        return measure_pace(Observations.join(parts), model, "pace")


_NOTHING_SEEN = Observations(*(np.zeros(0) for _ in range(8)))  # type: ignore[arg-type]


def slice_begin(kept: Sequence[Kept], since_ms: float, until_ms: float) -> float:
    """Return ``since_ms``, or a later begin from which on the requests in flight have ``MOST_READS`` at most."""
    while until_ms - since_ms > SHORTEST_MS:
        reads = sum(len(one.record.itl_ms) for one in kept if one.end_ms > since_ms and one.arrival_ms < until_ms)
        if reads <= MOST_READS:
            break
        since_ms = (since_ms + until_ms) / 2
    return since_ms


def slice_steps(
    meta: Meta,
    records: list[Record],
    cached_tokens: list[int],
    model: Model,
    span_ms: tuple[float, float],
) -> Observations:
    """Return an engine's steps in a span of time; ``records``: all requests in flight in it, by arrival."""
    columns = plan_arrivals(meta, records, model.engine.block_size, needs_hashes=False)
    capture = Capture(records, columns, columns.objects(), cached_tokens, None)
    seen = priced_steps(capture, model)
    return seen.select((seen.start_ms >= span_ms[0]) & (seen.start_ms < span_ms[1]))


def allowed_reach(model: Model) -> float:
    """Return how far log(pace) may be from 0 by the drift between the model's captures, at the ends of 95 %."""
    score = stdtrit(model.drift_freedom, INTERVAL[1]) if model.drift_freedom else ndtri(INTERVAL[1])
    return max(float(score) * model.drift_log_sd, LEAST)


def is_outside(pace: Pace, reach: float) -> bool:
    """Return whether a pace is out of the model's range by more than both are known."""
    return abs(log(pace.factor)) > hypot(reach, pace.reach)


def live_pace(pace: Pace, reach: float) -> LivePace:
    return LivePace(
        factor=round(pace.factor, 4),
        low=round(pace.factor * exp(-pace.reach), 4),
        high=round(pace.factor * exp(pace.reach), 4),
        intervals=pace.intervals,
        outside=is_outside(pace, reach),
    )


@dataclass(slots=True)
class DriftAlarm:
    """On after ``JUDGEMENTS`` in a row outside, off after as many inside; judgements without a pace change nothing."""

    drifted: bool = False
    since_ms: float | None = None
    """Time of the first judgement in a row that differs from the one before."""
    _differing: int = 0
    _first_ms: float = math.nan

    def judge(self, *, outside: bool, at_ms: float) -> None:
        if outside == self.drifted:
            self._differing = 0
            return
        self._differing += 1
        if self._differing == 1:
            self._first_ms = at_ms
        if self._differing >= JUDGEMENTS:
            self.drifted, self._differing = outside, 0
            self.since_ms = self._first_ms if outside else None
