"""Forecasts of the last requests beside what was seen: by the model, at the live pace, on caches of other sizes.

The live pace is that of the last minutes, from one slice of time per judgement. Its alarm is on where the pace leaves
the model's drift.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, hypot, log

import msgspec
import numpy as np

from measure.modelstate import COHORTS, LEVELS, CacheRow, Estimate, LivePace, TtftRow
from measure.runs import make_run
from measure.scores import ndtri, stdtrit
from measure.survival import Waits, incidence, pooled_waits, quantiles
from measure.waits import first_token_waits as seen_first_tokens
from sim.fit.drift import INTERVAL
from sim.fit.factualhits import with_factual_hits
from sim.fit.observations import Observations
from sim.fit.pace import Pace, measure_pace, priced_steps
from sim.fit.variants import Capture
from sim.forecast.ensemble import Forecast, forecast, interval, members
from sim.forecast.saturation import PointRun, beyond_fit, beyond_log_sd, run_point
from sim.forecast.summary import finite, first_token_waits
from sim.latency.modelfile import Model
from sim.vllm.config import EngineConfig
from sim.watch.window import SIZES, CacheSizes, Kept
from sim.workload.arrivals import Arrivals, plan_arrivals
from tracefile.records.arrays import BoolArray, FloatArray, IntArray
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


FEWEST = 30
"""Requests of a cohort that is judged."""
FEWEST_OF_P99 = 100
WARM = 0.5
_LEVELS = np.array(list(LEVELS.values()))


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests of one engine that arrived before a time, in the order of arrival; n of them."""

    kept: Sequence[Kept]
    arrivals: Arrivals
    judged: BoolArray
    """Shape (n,): the engine got it, it was streamed, and all requests that met it are here."""
    cached_tokens: IntArray
    """Shape (n,): as reported, else as the hashes have it at the cache's size."""

    @property
    def records(self) -> list[Record]:
        return [one.record for one in self.kept]

    @property
    def is_warm(self) -> BoolArray:
        return np.asarray(self.cached_tokens >= WARM * self.arrivals.prompt_tokens)

    def cohort(self, name: str) -> IntArray:
        wanted = {"all": np.ones(len(self.judged), bool), "warm": self.is_warm, "cold": ~self.is_warm}[name]
        return np.flatnonzero(self.judged & wanted)

    def hits(self, size: int) -> IntArray:
        """Hit tokens of each request in a cache of the size at this place of ``SIZES``."""
        return np.array([0 if one.hits is None else one.hits[size] for one in self.kept], np.int64)


def engine_load(meta: Meta, kept: Sequence[Kept], engine: EngineConfig, begin_ms: float) -> EngineLoad:
    """``kept``: one engine's requests, by arrival. Those that arrived before ``begin_ms`` are not judged."""
    records = [one.record for one in kept]
    arrivals = plan_arrivals(meta, records, engine.block_size, needs_hashes=False)
    streamed = np.array([record.stream is not False for record in records], bool)
    judged = streamed & arrivals.runs & (arrivals.arrival_ms >= begin_ms)
    today = list(SIZES).index("today")
    cached = [one.record.cached_tokens for one in kept]
    ruled = [0 if one.hits is None else int(one.hits[today]) for one in kept]
    known = [own if told is None else told for told, own in zip(cached, ruled, strict=True)]
    return EngineLoad(kept, arrivals, judged, np.array(known, np.int64))


@dataclass(frozen=True, slots=True)
class Forecasts:
    """Forecasts of all engines' loads by the same members."""

    loads: Sequence[EngineLoad]
    found: Sequence[Forecast]
    """Of each load, after the requests that leave its hits."""

    def ttft_ms(self, cohort: str) -> FloatArray:
        """Quantiles of a cohort's TTFT: shape (members, levels)."""
        return np.array([self._member_ms(number, cohort) for number in range(self.found[0].members)])

    def _member_ms(self, member: int, cohort: str) -> FloatArray:
        waits = []
        for load, found in zip(self.loads, self.found, strict=True):
            before = found.ttft_ms.shape[1] - len(load.arrivals)
            waits.append(first_token_waits(found, member, before + load.cohort(cohort)))
        return _at_levels(waits)


def forecast_loads(
    loads: Sequence[EngineLoad],
    cached_tokens: Sequence[IntArray],
    engine: EngineConfig,
    models: Sequence[Model],
    seed: int,
) -> Forecasts:
    """Forecast each load with these hits, on one core; requests come when they came."""
    found = []
    for load, cached in zip(loads, cached_tokens, strict=True):
        arrivals, roomy = with_factual_hits(load.arrivals, engine, cached)
        found.append(forecast(arrivals, roomy, models, seed=seed, threads=1))
    return Forecasts(loads, found)


def drawn_models(
    loads: Sequence[EngineLoad], engine: EngineConfig, model: Model, count: int, seed: int
) -> tuple[list[Model], list[str]]:
    """Return members, spread farther where a load is beyond the model's captures, and what it is beyond."""
    points = [_own_point(load, engine, model) for load in loads]
    farther = max(beyond_log_sd(point, model) for point in points)
    beyond = [f"beyond the fit: {said}" for point in points for said in beyond_fit(point, model)]
    return members(model, count, seed, farther), beyond


def _own_point(load: EngineLoad, engine: EngineConfig, model: Model) -> PointRun:
    """Return a run without noise; steps and requests of the load alone, without those that leave its hits."""
    arrivals, roomy = with_factual_hits(load.arrivals, engine, load.cached_tokens)
    point = run_point(arrivals, roomy, model)
    before = len(arrivals) - len(load.arrivals)
    scheduler = point.state.scheduler._replace(requests=point.state.scheduler.requests[before:])
    own = point.state.timeline.starts_ms[: len(point.counts)] >= load.arrivals.arrival_ms.min(initial=np.inf)
    return PointRun(point.state._replace(scheduler=scheduler), point.counts[own], point.costs)


def ttft_rows(meta: Meta, loads: Sequence[EngineLoad], by_model: Forecasts, at_pace: Forecasts | None) -> list[TtftRow]:
    runs = [make_run("seen", "", meta, load.records) for load in loads]
    rows: list[TtftRow] = []
    for cohort in COHORTS:
        waits = [seen_first_tokens(run, load.cohort(cohort)) for run, load in zip(runs, loads, strict=True)]
        rows += _cohort_rows(cohort, waits, by_model, at_pace)
    return rows


def _cohort_rows(
    cohort: str, waits: Sequence[Waits], by_model: Forecasts, at_pace: Forecasts | None
) -> Iterator[TtftRow]:
    n = sum(map(len, waits))
    if n < FEWEST:
        return
    seen_ms, model_ms = _at_levels(waits), by_model.ttft_ms(cohort)
    pace_ms = None if at_pace is None else at_pace.ttft_ms(cohort)
    for place, level in enumerate(told_levels(n)):
        yield TtftRow(
            cohort=cohort,
            level=level,
            n=n,
            seen_ms=_ms(float(seen_ms[place])),
            predicted=_estimate(model_ms[:, place]),
            at_pace=None if pace_ms is None else _estimate(pace_ms[:, place]),
        )


def told_levels(n: int) -> list[str]:
    """Return the levels that n requests tell, the first of ``LEVELS``."""
    return [level for level in LEVELS if n >= (FEWEST_OF_P99 if level == "p99" else FEWEST)]


def cache_rows(
    loads: Sequence[EngineLoad], sizes: CacheSizes, engine: EngineConfig, models: Sequence[Model], seed: int
) -> Iterator[CacheRow]:
    """Yield hit rate and TTFT of the judged requests at each of ``SIZES``, all by the same rule."""
    prompts = sum(int(load.arrivals.prompt_tokens[load.judged].sum()) for load in loads)
    for place, name in enumerate(SIZES):
        hits = [load.hits(place) for load in loads]
        hit = sum(int(tokens[load.judged].sum()) for load, tokens in zip(loads, hits, strict=True))
        blocks = sizes.blocks[name]
        needed = max(_held_blocks(load, tokens, engine.block_size) for load, tokens in zip(loads, hits, strict=True))
        row = CacheRow(cache=name, num_gpu_blocks=blocks + 1, hit_rate=round(hit / max(prompts, 1), 5))
        if needed > blocks:
            reason = f"requests in flight need up to {needed:,} blocks of their own: they would wait for each other"
            yield msgspec.structs.replace(row, withheld=reason)
            continue
        ttft_ms = forecast_loads(loads, hits, engine, models, seed).ttft_ms("all")
        levels = told_levels(sum(len(load.cohort("all")) for load in loads))
        yield msgspec.structs.replace(
            row, ttft={level: _estimate(ttft_ms[:, number]) for number, level in enumerate(levels)}
        )


def _held_blocks(load: EngineLoad, hits: IntArray, block_size: int) -> int:
    """Most blocks that requests in flight held at once, each but for what it hit: others may hold that, too."""
    records = load.records
    own = [
        -(-max(record.context_tokens() - hit, 0) // block_size)
        for record, hit in zip(records, hits.tolist(), strict=True)
    ]
    events = [(one.arrival_ms, blocks) for one, blocks in zip(load.kept, own, strict=True)]
    events += [(one.end_ms, -blocks) for one, blocks in zip(load.kept, own, strict=True)]
    held = np.cumsum([blocks for _, blocks in sorted(events)])
    return int(held.max(initial=0))


def _at_levels(waits: Sequence[Waits]) -> FloatArray:
    """Quantiles of several samples together; infinite where too few have an event."""
    whole = pooled_waits(waits)
    return quantiles(whole, incidence(whole), _LEVELS) if len(whole) else np.full(len(_LEVELS), np.inf)


def _estimate(values_ms: FloatArray) -> Estimate:
    found = interval(values_ms)
    return Estimate(_ms(found.middle), _ms(found.low), _ms(found.high))


def _ms(value: float) -> float | None:
    """Return a time to the microsecond, as traces have it; None: not finite."""
    found = finite(value)
    return None if found is None else round(found, 3)
