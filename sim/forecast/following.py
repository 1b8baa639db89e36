"""``sim validate --follow``: a model beside a growing trace of one engine, minute by minute: its pace and drift."""

import argparse
import os
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import exp, hypot, log
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from measure.scores import ndtri, stdtrit
from measure.wording import NOTHING
from sim.fit.drift import INTERVAL
from sim.fit.pace import Pace, measure_pace, priced_steps
from sim.fit.variants import Capture
from sim.forecast.captured import captured_engine
from sim.latency.modelfile import Model, engine_with, load_model
from sim.latency.verdicts import engine_warning
from sim.vllm.config import engine_overrides
from sim.vllm.settings import refuse_other_attention
from sim.workload.arrivals import plan_arrivals
from tracefile.commandline.ending import verdict_code
from tracefile.files.reading import FollowedTrace, wait_for_more
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record

NICENESS = 15
POLL_S = 1.0
REST = 19.0
"""Pause after a judgement, in its CPU time: a twentieth of a core at most."""
WINDOW_MS, EVERY_MS = 600e3, 60e3
"""Time that is judged, and from one judgement to the next."""
MOST_REQUESTS = 2048
MOST_READS = 1 << 18
"""Token reads of all kept requests: rebuilding the steps of more takes seconds."""
LEAST = log(1.05)
"""Drift that is never reported: forecasts' bands are wider."""
JUDGEMENTS = 3
"""In a row that say the same before the alarm changes."""


class Bounds(msgspec.Struct, frozen=True):
    """A value and the ends of its interval."""

    middle: float
    low: float
    high: float


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """A model beside the last minutes of a trace. Times in ms on the trace's clock."""

    allowed: tuple[float, float]
    """Range of drift: paces that the model's captures let expect."""
    epoch_unix_ns: int | None = None
    """Wall clock of the trace's time 0. Null: the trace does not report it."""
    from_ms: float = 0.0
    until_ms: float = 0.0
    """The judged requests arrived between these."""
    requests: int = 0
    pace: Bounds | None = None
    """Time of the engine's steps over the model's, with its 95 % interval. Null: a note tells the reason."""
    outside: bool = False
    """The pace is outside the model's own range of drift, by more than the measurement's error."""
    drifted: bool = False
    """The pace has been outside for several judgements in a row, and not been back for as many."""
    drifted_since_ms: float | None = None
    notes: list[str] = []


def allowed_reach(model: Model) -> float:
    """Return how far log(pace) may be from 0 by the drift between the model's captures, at the ends of 95 %."""
    score = stdtrit(model.drift_freedom, INTERVAL[1]) if model.drift_freedom else ndtri(INTERVAL[1])
    return max(float(score) * model.drift_log_sd, LEAST)


def is_outside(pace: Pace, reach: float) -> bool:
    """Return whether a pace is out of the model's range by more than both are known."""
    return abs(log(pace.factor)) > hypot(reach, pace.reach)


@dataclass(slots=True)
class DriftAlarm:
    """On after ``JUDGEMENTS`` in a row outside, off after as many inside; judgements without a pace change nothing."""

    drifted: bool = False
    since_ms: float | None = None
    """Time of the first judgement in a row that differs from the one before."""
    _differing_ms: list[float] = field(default_factory=list)

    def judge(self, *, outside: bool, at_ms: float) -> None:
        self._differing_ms = [] if outside == self.drifted else [*self._differing_ms, at_ms]
        if len(self._differing_ms) == JUDGEMENTS:
            self.drifted, self.since_ms = outside, self._differing_ms[0] if outside else None
            self._differing_ms = []


class ModelWatch:
    """Times are the trace's own: the same trace gives the same judgements."""

    def __init__(self, trace: Path, model: Path, overrides: dict[str, Any], upstream: str | None = None) -> None:
        """``upstream``: the engine to judge, of a trace of several."""
        self._trace, self._overrides = trace, overrides
        self._engine, self._is_chosen = upstream, upstream is not None
        self._fitted = load_model(model)
        self._reach = allowed_reach(self._fitted)
        self._alarm = DriftAlarm()
        self._meta: Meta | None = None
        self._begin()

    def _begin(self) -> None:
        self._kept = deque[tuple[Record, float]]()
        """Requests with their ends, in the order of these."""
        self._reads = 0
        self._latest_ms = self._begin_ms = -np.inf
        self._judged_ms: float | None = None

    def take(self, record: Record, meta: Meta) -> None:
        """Take the next request to end; another engine in the header begins anew. Raises InputError."""
        if self._meta is None or meta.engine != self._meta.engine:
            refuse_other_attention(meta, self._trace)
            self._meta = meta
            self._begin()
        end_ms = record.end_ms()
        if record.arrival_ms is None or end_ms is None or not self._is_of_engine(record):
            return
        self._kept.append((record, end_ms))
        self._reads += len(record.itl_ms)
        self._latest_ms = max(self._latest_ms, end_ms)
        self._judged_ms = end_ms if self._judged_ms is None else self._judged_ms
        first_ms = self._latest_ms - WINDOW_MS
        # Of faster traffic a shorter time is kept: sessions are parts of batches.
        while len(self._kept) > MOST_REQUESTS or self._reads > MOST_READS or self._kept[0][1] < first_ms:
            if len(self._kept) == 1:
                break
            gone, gone_ms = self._kept.popleft()
            self._reads -= len(gone.itl_ms)
            self._begin_ms = max(self._begin_ms, gone_ms)  # all requests in flight from then on are kept

    def _is_of_engine(self, record: Record) -> bool:
        self._engine = self._engine or record.upstream
        if record.upstream not in (None, self._engine) and not self._is_chosen:
            raise InputError(f"{self._trace}: requests of {self._engine} and {record.upstream}; expected --upstream")
        return record.upstream == self._engine  # one without an upstream was refused by the tap itself

    @property
    def is_due(self) -> bool:
        """True once the trace has gone on by ``EVERY_MS`` since the last judgement."""
        return self._judged_ms is not None and self._latest_ms >= self._judged_ms + EVERY_MS

    def judge(self) -> Judgement:
        """Judge the requests of the window up to the time by which all that arrived have ended."""
        assert self._meta is not None
        self._judged_ms, until_ms = self._latest_ms, self._known_until_ms()
        begin_ms = max(self._begin_ms, until_ms - WINDOW_MS)
        met = [record for record, end_ms in self._kept if (record.arrival_ms or 0.0) < until_ms and end_ms > begin_ms]
        records = sorted(met, key=lambda record: record.arrival_ms or 0.0)
        engine = captured_engine(self._fitted.engine, self._meta, records)
        model = msgspec.structs.replace(self._fitted, engine=engine_with(engine, self._overrides))
        judgement = Judgement(
            allowed=(round(exp(-self._reach), 4), round(exp(self._reach), 4)),
            epoch_unix_ns=self._meta.epoch_unix_ns,
            from_ms=round(max(begin_ms, min((one.arrival_ms or 0.0 for one in records), default=begin_ms)), 3),
            until_ms=round(until_ms, 3),
            notes=list(engine_warning(self._fitted, self._meta, model.engine)),
        )
        served = [record for record in records if record.ttft_ms is not None]
        if 2 * sum(record.cached_tokens is not None for record in served) < len(served) or not records:
            judgement.notes.append("cached tokens: most records have none; nothing is judged (tap --inject usage)")
            return msgspec.structs.replace(judgement, drifted=self._alarm.drifted)
        return self._judged(judgement, records, model)

    def _known_until_ms(self) -> float:
        """Time by which all arrived requests have ended: as long ago as the longest took, or half of the window."""
        longest_ms = max(end_ms - (record.arrival_ms or 0.0) for record, end_ms in self._kept)
        first_ms = max(self._begin_ms, self._kept[0][0].arrival_ms or 0.0)
        return self._latest_ms - min(longest_ms, (self._latest_ms - first_ms) / 2)

    def _judged(self, judgement: Judgement, records: list[Record], model: Model) -> Judgement:
        """Return the judgement with the pace."""
        assert self._meta is not None
        cached = np.array([record.cached_tokens or 0 for record in records], np.int64)
        arrivals = plan_arrivals(self._meta, records, model.engine.block_size, needs_hashes=False)
        capture = Capture(records, arrivals, arrivals.objects(), cached.tolist(), None)
        pace: Pace | None = None
        seen = priced_steps(capture, model)
        inside = (seen.start_ms >= judgement.from_ms) & (seen.start_ms < judgement.until_ms)
        try:
            pace = measure_pace(seen.select(inside), model, "pace")
            self._alarm.judge(outside=is_outside(pace, self._reach), at_ms=judgement.until_ms)
        except InputError as error:
            judgement.notes.append(str(error))
        return msgspec.structs.replace(
            judgement,
            requests=int((arrivals.runs & (arrivals.arrival_ms >= judgement.from_ms)).sum()),
            pace=None if pace is None else _bounds(pace.factor, exp(pace.reach)),
            outside=pace is not None and is_outside(pace, self._reach),
            drifted=self._alarm.drifted,
            drifted_since_ms=self._alarm.since_ms,
        )


def _bounds(value: float, factor: float) -> Bounds:
    return Bounds(round(value, 4), round(value / factor, 4), round(value * factor, 4))


def run(arguments: argparse.Namespace) -> int:
    """Judge until Ctrl-C; 1 if the model has drifted by then, 3 if the last pace is too uncertain to say."""
    trace, overrides = arguments.trace, engine_overrides(arguments)
    watch = ModelWatch(trace, arguments.latency_model, overrides, arguments.upstream)
    last: Judgement | None = None
    os.nice(NICENESS)
    print(f"{trace}: followed until Ctrl-C", file=sys.stderr, flush=True)
    for last in _followed(watch, trace):
        if arguments.json:
            sys.stdout.write(msgspec.json.encode(last).decode() + "\n")
        print("\n".join(describe(last)), file=sys.stderr if arguments.json else None, flush=True)
    return verdict_code(failed=last is not None and last.drifted, uncertain=last is not None and is_uncertain(last))


def is_uncertain(one: Judgement) -> bool:
    """Return if the pace's own interval is wider than the range of drift, so that a drift of it would not show."""
    pace = one.pace
    return pace is None or (not one.outside and pace.high / pace.middle > one.allowed[1])


def _followed(watch: ModelWatch, path: Path) -> Iterator[Judgement]:
    trace, rest_s = FollowedTrace(path), 0.0
    while True:
        for record in trace.new_records():
            assert trace.meta is not None
            watch.take(record, trace.meta)
        if watch.is_due and rest_s <= 0.0:
            begun_s = sum(os.times()[:2])
            yield watch.judge()
            rest_s = REST * (sum(os.times()[:2]) - begun_s)
        if not wait_for_more(POLL_S):
            return
        rest_s -= POLL_S


def describe(one: Judgement) -> list[str]:
    """Return a judgement as lines: the pace, notes."""
    low, high = one.allowed
    lines = [
        f"{_clock(one, one.until_ms)}: {one.requests:,} requests since {_clock(one, one.from_ms)}; "
        f"pace {_interval(one.pace)}, expected {low:.2f} to {high:.2f}"
    ]
    if one.drifted:
        since = _clock(one, one.drifted_since_ms or 0.0)
        lines.append(f"  the model has drifted since {since}; scale it (sim calibrate --pace-from) or fit it again")
    return lines + [f"  {note}" for note in one.notes]


def _interval(bounds: Bounds | None) -> str:
    return NOTHING if bounds is None else f"{bounds.middle:.2f} ({bounds.low:.2f} to {bounds.high:.2f})"


def _clock(one: Judgement, time_ms: float) -> str:
    """Return a time of the trace as HH:MM:SS UTC, or as seconds of the trace where its wall clock is not known."""
    if one.epoch_unix_ns is None:
        return f"{time_ms / 1e3:.0f} s"
    return datetime.fromtimestamp(one.epoch_unix_ns / 1e9 + time_ms / 1e3, UTC).strftime("%H:%M:%S UTC")
