"""A model beside a trace of one engine: takes its requests one by one, judges the last minutes, and shows gauges."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp, hypot, log
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from measure.exposition import Families
from measure.runs import make_run
from measure.scores import ndtri, stdtrit
from measure.survival import incidence, quantiles
from measure.waits import first_token_waits
from sim.fit.drift import INTERVAL
from sim.fit.factualhits import with_factual_hits
from sim.fit.pace import Pace, measure_pace, priced_steps
from sim.fit.variants import Capture
from sim.forecast.captured import captured_engine
from sim.forecast.ensemble import forecast, interval, members
from sim.forecast.summary import ttft_quantiles
from sim.latency.modelfile import Model, engine_with, load_model
from sim.latency.verdicts import engine_warning
from sim.vllm.settings import refuse_other_attention
from sim.workload.arrivals import plan_arrivals
from tracefile.records.arrays import IntArray
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record

WINDOW_MS, EVERY_MS = 600e3, 60e3
"""Time that is judged, and from one judgement to the next."""
MOST_REQUESTS = 2048
MOST_READS = 1 << 18
"""Token reads of all kept requests: rebuilding the steps of more takes seconds."""
MEMBERS = 20
LEAST = log(1.05)
"""Drift that is never reported: forecasts' bands are wider."""
JUDGEMENTS = 3
"""In a row that say the same before the alarm changes."""
LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
FEWEST = {"p50": 30, "p90": 30, "p99": 100}
"""Requests of which a quantile is judged."""


class Bounds(msgspec.Struct, frozen=True):
    """A value and the ends of its interval. Null: not finite."""

    middle: float | None
    low: float | None
    high: float | None


class TtftRow(msgspec.Struct, frozen=True, kw_only=True):
    """A TTFT quantile of the judged requests, ms."""

    level: str
    seen: float | None
    """Null: more than the rest waited for no first token."""
    predicted: Bounds


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
    ttft: list[TtftRow] = []
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
    def is_empty(self) -> bool:
        """True until a request with an arrival and an end comes."""
        return self._judged_ms is None

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
        """Return the judgement with pace and TTFT."""
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
        streamed = np.array([record.stream is not False for record in records])
        judged = np.flatnonzero(streamed & arrivals.runs & (arrivals.arrival_ms >= judgement.from_ms))
        return msgspec.structs.replace(
            judgement,
            requests=len(judged),
            pace=None if pace is None else _bounds(pace.factor, exp(pace.reach)),
            outside=pace is not None and is_outside(pace, self._reach),
            drifted=self._alarm.drifted,
            drifted_since_ms=self._alarm.since_ms,
            ttft=ttft_rows(self._meta, capture, model, judged) if len(judged) >= FEWEST["p50"] else [],
        )


def _bounds(value: float, factor: float) -> Bounds:
    return Bounds(round(value, 4), round(value / factor, 4), round(value * factor, 4))


def ttft_rows(meta: Meta, capture: Capture, model: Model, judged: IntArray) -> list[TtftRow]:
    """Return TTFT quantiles of the requests at ``judged``, seen and forecast with the hits that they had."""
    levels = np.array([*LEVELS.values()])
    waits = first_token_waits(make_run("seen", "", meta, capture.records), judged)
    seen_ms = quantiles(waits, incidence(waits), levels)
    arrivals, roomy = with_factual_hits(capture.columns, model.engine, np.array(capture.cached_tokens))
    made = forecast(arrivals, roomy, members(model, MEMBERS, 0), seed=0, threads=1)
    places = judged + len(arrivals) - len(capture.records)  # behind requests that leave the hits
    by_member = np.array([ttft_quantiles(made, member, places, levels).values_ms for member in range(MEMBERS)])
    rows = []
    for column, level in enumerate(LEVELS):
        if len(judged) >= FEWEST[level]:
            band = interval(by_member[:, column])
            predicted = Bounds(_ms(band.middle), _ms(band.low), _ms(band.high))
            rows.append(TtftRow(level=level, seen=_ms(float(seen_ms[column])), predicted=predicted))
    return rows


def _ms(value: float) -> float | None:
    """Return a time to the microsecond, as traces have it; None: not finite."""
    return round(value, 3) if np.isfinite(value) else None


class Gauges(Collector):
    """Collects nothing until there is a judgement."""

    def __init__(self) -> None:
        self.judgement: Judgement | None = None

    def collect(self) -> Iterator[Metric]:
        if (one := self.judgement) is None:
            return
        low, high = one.allowed
        gauge = Families("kvtape_watch_").gauge
        yield gauge("drifted", "1: the pace has left the model's drift.", [((), one.drifted)])
        yield gauge("pace", "Steps' time over the model's.", _rows(one.pace), ["bound"])
        yield gauge("allowed_pace", "The model's range.", [(("low",), low), (("high",), high)], ["bound"])
        yield gauge("requests", "Judged requests of the last ten minutes.", [((), one.requests)])
        labels = ["quantile", "bound"]
        seen = [((row.level, "seen"), row.seen / 1e3) for row in one.ttft if row.seen is not None]
        made = [((row.level, *bound), value / 1e3) for row in one.ttft for bound, value in _rows(row.predicted)]
        yield gauge("ttft_seconds", "TTFT seen, and predicted with its interval.", seen + made, labels)


def _rows(bounds: Bounds | None) -> list[tuple[tuple[str], float]]:
    named = [] if bounds is None else [("middle", bounds.middle), ("low", bounds.low), ("high", bounds.high)]
    return [((name,), value) for name, value in named if value is not None]


def serve(address: str) -> Gauges:
    """Serve gauges at HOST:PORT, on a thread of the library. Raises InputError for an address that cannot be used."""
    host, _, port = address.rpartition(":")
    gauges, registry = Gauges(), CollectorRegistry()
    registry.register(gauges)
    try:
        start_http_server(int(port), host or "0.0.0.0", registry)
    except (ValueError, OverflowError, OSError) as error:
        raise InputError(f"--metrics {address}: {error}; expected HOST:PORT, free on this machine") from None
    return gauges
