"""``sim validate --follow``: a model beside a growing trace of one engine, minute by minute: its pace and drift."""

import argparse
import os
import sys
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from math import exp, hypot, log
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from measure.scores import ndtri, stdtrit
from report.grid.points import Span, span_text
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
from tracefile.files.following import FollowedTrace, wait_for_more
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record

NICENESS = 15
POLL_S = 10.0
WINDOW_MS, EVERY_MS = 600e3, 60e3
"""Time that is judged, and from one judgement to the next."""
MOST_REQUESTS = 2048
LEAST = log(1.05)
"""Drift that is never reported: forecasts' bands are wider."""
JUDGEMENTS = 3
"""In a row outside before the model has drifted."""


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
    pace: Span | None = None
    """Time of the engine's steps over the model's, with its 95 % interval. Null: a note tells the reason."""
    outside: bool = False
    """The pace is outside the model's own range of drift, by more than the measurement's error."""
    drifted: bool = False
    """The last ``JUDGEMENTS`` paces are outside."""
    notes: list[str] = []


def allowed_reach(model: Model) -> float:
    """Return how far log(pace) may be from 0 by the drift between the model's captures, at the ends of 95 %."""
    score = stdtrit(model.drift_freedom, INTERVAL[1]) if model.drift_freedom else ndtri(INTERVAL[1])
    return max(float(score) * model.drift_log_sd, LEAST)


def is_outside(pace: Pace, reach: float) -> bool:
    """Return whether a pace is out of the model's range by more than both are known."""
    return abs(log(pace.factor)) > hypot(reach, pace.reach)


class ModelWatch:
    """Times are the trace's own: the same trace gives the same judgements."""

    def __init__(self, trace: Path, model: Path, overrides: dict[str, Any], upstream: str | None = None) -> None:
        """``upstream``: the engine to judge, of a trace of several."""
        self._trace, self._overrides = trace, overrides
        self._engine, self._is_chosen = upstream, upstream is not None
        self._fitted = load_model(model)
        self._reach = allowed_reach(self._fitted)
        self._outside = deque[bool](maxlen=JUDGEMENTS)
        self._meta: Meta | None = None
        self._begin()

    def _begin(self) -> None:
        self._kept = deque[tuple[Record, float]]()
        """Requests with their ends, in the order of these."""
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
        self._latest_ms = max(self._latest_ms, end_ms)
        self._judged_ms = end_ms if self._judged_ms is None else self._judged_ms
        first_ms = self._latest_ms - WINDOW_MS
        while len(self._kept) > 1 and (len(self._kept) > MOST_REQUESTS or self._kept[0][1] < first_ms):
            self._begin_ms = max(self._begin_ms, self._kept.popleft()[1])  # those in flight from then on are kept

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
        from_ms = max(begin_ms, records[0].arrival_ms or 0.0) if records else begin_ms
        engine = captured_engine(self._fitted.engine, self._meta, records)
        model = msgspec.structs.replace(self._fitted, engine=engine_with(engine, self._overrides))
        notes = list(engine_warning(self._fitted, self._meta, model.engine))
        pace = self._pace(records, model, (from_ms, until_ms), notes)
        if pace is not None:
            self._outside.append(is_outside(pace, self._reach))
        return Judgement(
            allowed=(round(exp(-self._reach), 4), round(exp(self._reach), 4)),
            epoch_unix_ns=self._meta.epoch_unix_ns,
            from_ms=round(from_ms, 3),
            until_ms=round(until_ms, 3),
            requests=sum((record.arrival_ms or 0.0) >= from_ms for record in records),
            pace=None if pace is None else _span(pace),
            outside=pace is not None and self._outside[-1],
            drifted=len(self._outside) == JUDGEMENTS and all(self._outside),
            notes=notes,
        )

    def _known_until_ms(self) -> float:
        """Time by which all arrived requests have ended: as long ago as the longest took, or half of the window."""
        longest_ms = max(end_ms - (record.arrival_ms or 0.0) for record, end_ms in self._kept)
        first_ms = max(self._begin_ms, self._kept[0][0].arrival_ms or 0.0)
        return self._latest_ms - min(longest_ms, (self._latest_ms - first_ms) / 2)

    def _pace(
        self, records: list[Record], model: Model, between_ms: tuple[float, float], notes: list[str]
    ) -> Pace | None:
        """Return the pace of the steps in a time; None: it is not known, as the note added tells."""
        assert self._meta is not None
        served = [record for record in records if record.ttft_ms is not None]
        if 2 * sum(record.cached_tokens is not None for record in served) < len(served) or not records:
            notes.append("cached tokens: most records have none; nothing is judged (tap --inject usage)")
            return None
        arrivals = plan_arrivals(self._meta, records, model.engine.block_size, needs_hashes=False)
        cached = [record.cached_tokens or 0 for record in records]
        seen = priced_steps(Capture(records, arrivals, cached, None), model)
        inside = (seen.start_ms >= between_ms[0]) & (seen.start_ms < between_ms[1])
        try:
            return measure_pace(seen.select(inside), model, "pace")
        except InputError as error:
            notes.append(str(error))
            return None


def _span(pace: Pace) -> Span:
    middle, error = pace.factor, exp(pace.reach)
    return Span(middle=round(middle, 4), low=round(middle / error, 4), high=round(middle * error, 4))


def run(arguments: argparse.Namespace) -> int:
    """Judge until Ctrl-C; 1 if the model has drifted by then, 3 if the last pace is too uncertain to say."""
    trace, overrides = arguments.trace, engine_overrides(arguments)
    watch = ModelWatch(trace, arguments.latency_model, overrides, arguments.upstream)
    last: Judgement | None = None
    os.nice(NICENESS)
    print(f"{trace}: followed until Ctrl-C", file=sys.stderr, flush=True)
    for last in _followed(watch, FollowedTrace(trace)):
        if arguments.json:
            sys.stdout.write(msgspec.json.encode(last).decode() + "\n")
        print("\n".join(describe(last)), file=sys.stderr if arguments.json else None, flush=True)
    return verdict_code(failed=last is not None and last.drifted, uncertain=last is not None and is_uncertain(last))


def is_uncertain(one: Judgement) -> bool:
    """Return if the pace's own interval is wider than the range of drift, so that a drift of it would not show."""
    pace = one.pace
    return pace is None or (not one.outside and (pace.high or 0.0) / (pace.middle or 1.0) > one.allowed[1])


def _followed(watch: ModelWatch, trace: FollowedTrace) -> Iterator[Judgement]:
    while True:
        for record in trace.new_records():
            assert trace.meta is not None
            watch.take(record, trace.meta)
        if watch.is_due:
            yield watch.judge()
        if not wait_for_more(POLL_S):
            return


def describe(one: Judgement) -> list[str]:
    """Return a judgement as lines: the pace, drift, notes."""
    low, high = one.allowed
    pace = span_text(one.pace or Span(middle=None), "{:.2f}".format)
    requests = f"{one.requests:,} requests since {_clock(one, one.from_ms)}"
    lines = [f"{_clock(one, one.until_ms)}: {requests}; pace {pace}, expected {low:.2f} to {high:.2f}"]
    if one.drifted:
        lines.append("  the model has drifted; scale it (sim calibrate --pace-from) or fit it again")
    return lines + [f"  {note}" for note in one.notes]


def _clock(one: Judgement, time_ms: float) -> str:
    """Return a time of the trace as HH:MM:SS UTC, or as seconds of the trace where its wall clock is not known."""
    if one.epoch_unix_ns is None:
        return f"{time_ms / 1e3:.0f} s"
    return datetime.fromtimestamp(one.epoch_unix_ns / 1e9 + time_ms / 1e3, UTC).strftime("%H:%M:%S UTC")
