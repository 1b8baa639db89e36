"""Metrics of many traces, an engine each: counts and samples add up, rates are sums, and a wall time is the longest."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import fsum
from operator import itemgetter
from pathlib import Path
from typing import Final, Self, TypeVar

from msgspec.structs import replace

from measure.cache.hitcurve import HitCurve
from measure.cohorts import cohort_order
from measure.metrics.prefixcache import OwnHits, cache_size
from measure.metrics.results import (
    CacheSize,
    Client,
    Goodput,
    HealthCheck,
    HitCount,
    HitParting,
    Hits,
    Overview,
    Prefill,
    PrefillGroup,
    Rates,
    RequestCounts,
    SessionCounts,
    SloResult,
    Statistics,
    TraceMetrics,
    UpstreamMetrics,
    Verdict,
    Workload,
)
from measure.metrics.sketches import Sketch, sketch_of
from measure.metrics.slos import NUMBERS, RATES, Slo, goodput, judged, number_of, sample_of
from measure.metrics.statistics import statistic
from measure.metrics.trace import measure_run, read_run, study_chains
from measure.runs import STATUSES, Run
from tracefile.records.errors import InputError

Key = TypeVar("Key")
Value = TypeVar("Value")
SAMPLES: Final = ("per_request", "per_session", "shape")
GROUPS: Final = ("by_prompt_tokens", "by_uncached_tokens")
VERDICTS: Final[tuple[Verdict, ...]] = ("bad", "look", "unknown", "ok")
"""The worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsPart:
    """Metrics of one trace or of several: the samples added up, the few numbers of each trace as they are."""

    traces: dict[str, TraceMetrics]
    """By name, without samples."""
    sketches: dict[tuple[str, str], Sketch]
    """By table and row."""
    curves: dict[int, HitCurve]
    """By block size."""
    own: OwnHits

    def plus(self, other: Self) -> Self:
        return type(self)(
            traces=self.traces | other.traces,
            sketches=_added(self.sketches, other.sketches, Sketch.plus),
            curves=_added(self.curves, other.curves, HitCurve.plus),
            own=OwnHits(self.own.tokens + other.own.tokens, self.own.saved_tokens + other.own.saved_tokens),
        )

    def statistics(self, table: str, row: str) -> Statistics | None:
        found = self.sketches.get((table, row))
        return None if found is None else found.statistics()

    def rows(self, table: str) -> dict[str, Statistics]:
        """Return the rows of a table that have a sample, sorted."""
        return {
            row: one.statistics() for (of, row), one in sorted(self.sketches.items(), key=itemgetter(0)) if of == table
        }


def _added(
    one: Mapping[Key, Value], other: Mapping[Key, Value], plus: Callable[[Value, Value], Value]
) -> dict[Key, Value]:
    both = {**one, **other}
    return both | {key: plus(one[key], other[key]) for key in one.keys() & other.keys()}


def part_of(gpus: int | None, slos: Sequence[Slo]) -> Callable[[str], MetricsPart]:
    """Return the work on a trace; ``gpus``: of each."""
    return partial(_part, gpus, slos)


def _part(gpus: int | None, slos: Sequence[Slo], trace: str) -> MetricsPart:
    run = read_run(Path(trace))
    for warning in run.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return metrics_part(trace, run, gpus, slos)


def metrics_part(trace: str, run: Run, gpus: int | None = None, slos: Sequence[Slo] = ()) -> MetricsPart:
    """Return a run's metrics as a part."""
    study = study_chains(run)
    metrics = measure_run(run, gpus=gpus, study=study, measure=sketch_of)
    samples = {slo.threshold.text: sample_of(run, slo.threshold) for slo in slos if slo.threshold.metric not in NUMBERS}
    limited = ((("slos", text), sketch_of(values)) for text, values in samples.items())
    return MetricsPart(
        traces={trace: _without_samples(metrics, goodput(run, slos))},
        sketches={name: one for name, one in (*_samples(metrics), *limited) if isinstance(one, Sketch)},
        curves={} if study is None else {study.curve.block_size: study.curve},
        own=(study.own if study is not None else None) or OwnHits(0, 0),
    )


def _samples(metrics: TraceMetrics) -> Iterator[tuple[tuple[str, str], Statistics | None]]:
    for table in SAMPLES:
        yield from (((table, name), one) for name, one in getattr(metrics, table).items())
    for table in GROUPS:
        yield from (((table, f"{one.to_tokens:09}"), one.ttft_ms) for one in getattr(metrics.prefill, table))
    yield from ((("by_turn", name), one) for name, one in metrics.prefill.by_turn.items())
    yield from ((("upstreams", name), one.ttft_ms) for name, one in metrics.upstreams.items())
    yield ("client", "lag_ms"), metrics.client.lag_ms


def _without_samples(metrics: TraceMetrics, good: Goodput | None) -> TraceMetrics:
    return replace(
        metrics,
        **{table: dict.fromkeys(getattr(metrics, table)) for table in SAMPLES},
        workload=replace(metrics.workload, timeline=None, goodput=good),
        prefill=Prefill(by_prompt_tokens=[], by_uncached_tokens=[], fit=None, by_turn={}),
        upstreams={name: replace(one, ttft_ms=None) for name, one in metrics.upstreams.items()},
        client=replace(metrics.client, lag_ms=None),
    )


def merged_metrics(part: MetricsPart, slos: Sequence[Slo], kv_bytes_per_token: int | None) -> TraceMetrics:
    """Return the metrics of all traces together; null or empty is what traces with clocks of their own have not.

    Raises InputError if no trace has the metric of an SLO.
    """
    traces = [part.traces[name] for name in sorted(part.traces)]
    requests = _requests([one.requests for one in traces])
    tables = {table: {row: part.statistics(table, row) for row in getattr(traces[0], table)} for table in SAMPLES}
    workload = _workload([one.workload for one in traces], tables["per_request"], requests.n)
    return TraceMetrics(
        source=_names(one.source for one in traces),
        engine=_names(one.engine for one in traces),
        model=_names(one.model for one in traces),
        requests=requests,
        sessions=SessionCounts(
            n=sum(one.sessions.n for one in traces),
            completed=sum(one.sessions.completed for one in traces),
            per_s=_sum(one.sessions.per_s for one in traces),
        ),
        per_request=tables["per_request"],
        per_session=tables["per_session"],
        shape=tables["shape"],
        workload=workload,
        overview=_overview([one.overview for one in traces], workload, requests),
        prefill=Prefill(
            **{table: _groups(part, table) for table in GROUPS},
            fit=None,
            by_turn=part.rows("by_turn"),
        ),
        hits=_hits([one.hits for one in traces]),
        cache=_cache(part, [one.cache for one in traces], kv_bytes_per_token),
        upstreams=_upstreams(part, [one.upstreams for one in traces]),
        client=_client(part, [one.client for one in traces]),
        health=_health({name: part.traces[name].health for name in sorted(part.traces)}),
        slos=[_judge(part, slo, workload, requests) for slo in slos],
    )


def _names(names: Iterable[str | None]) -> str | None:
    return ", ".join(sorted({name for name in names if name})) or None


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum of what is known, to the last bit the same in any order; null: nothing is."""
    known = [value for value in values if value is not None]
    return fsum(known) if known else None


def _same(values: Sequence[Value]) -> Value | None:
    return values[0] if all(value == values[0] for value in values) else None


def _requests(found: Sequence[RequestCounts]) -> RequestCounts:
    counts = [name for name in RequestCounts.__struct_fields__ if name not in ("success", "statuses", "with_hit")]
    sums = {name: sum(getattr(one, name) for one in found) for name in counts}
    n, completed, cancelled, reported = (sums[name] for name in ("n", "completed", "cancelled", "hit_reported"))
    with_hit = sum(round((one.with_hit or 0.0) * one.hit_reported) for one in found)
    statuses = sum((Counter(one.statuses) for one in found), Counter())
    return RequestCounts(
        **sums,
        success=completed / (n - cancelled) if n > cancelled else 0.0,
        statuses={status: statuses[status] for status in STATUSES if status in statuses},
        with_hit=with_hit / reported if reported else None,
    )


def _workload(found: Sequence[Workload], per_request: Mapping[str, Statistics | None], n: int) -> Workload:
    gpus = [one.gpus for one in found if one.gpus is not None]
    in_all = sum(gpus) if len(gpus) == len(found) else None
    tpot_ms, tbc_ms = statistic(per_request["tpot_ms"], "mean"), statistic(per_request["tbc_ms"], "p99")
    good = [one.goodput for one in found if one.goodput is not None]
    return Workload(
        wall_s=max(one.wall_s for one in found),
        gpus=in_all,
        requests_per_s=_sum(one.requests_per_s for one in found),
        **{name: _rates([getattr(one, name) for one in found], in_all) for name in RATES},
        tpot_based_tps=1000.0 / tpot_ms if tpot_ms else None,
        tbc_based_tps=1000.0 / tbc_ms if tbc_ms else None,
        concurrency=None,
        timeline=None,
        goodput=_goodput(good, n) if good else None,
    )


def _rates(found: Sequence[Rates], gpus: int | None) -> Rates:
    sums = {name: _sum(getattr(one, name) for one in found) for name in ("overall", "last_30s", "steady")}
    steady = sums["steady"]
    return Rates(**sums, steady_per_gpu=steady / gpus if steady is not None and gpus else None)


def _goodput(found: Sequence[Goodput], n: int) -> Goodput:
    requests = sum(one.requests for one in found)
    return Goodput(
        requests=requests,
        share=requests / n,
        requests_per_s=_sum(one.requests_per_s for one in found),
        completion_tps=_sum(one.completion_tps for one in found),
    )


def _overview(found: Sequence[Overview], workload: Workload, requests: RequestCounts) -> Overview:
    return Overview(
        concurrency=_same([one.concurrency for one in found]),
        rate=_same([one.rate for one in found]),
        n=requests.n,
        rps=workload.requests_per_s,
        gen_tps=workload.completion_tps.overall,
        success=requests.success,
    )


def _groups(part: MetricsPart, table: str) -> list[PrefillGroup]:
    """Groups of TTFT; a group's bounds are powers of two."""
    ends = {int(row): found for row, found in part.rows(table).items()}
    return [PrefillGroup(from_tokens=(end + 1) // 2, to_tokens=end, ttft_ms=found) for end, found in ends.items()]


def _counted(found: Iterable[HitCount]) -> HitCount:
    counts = list(found)
    requests, tokens, prompts = (
        sum(getattr(one, name) for one in counts) for name in ("requests", "tokens", "prompt_tokens")
    )
    return HitCount(requests=requests, tokens=tokens, prompt_tokens=prompts, rate=tokens / prompts if prompts else None)


def _hits(found: Sequence[Hits]) -> Hits:
    cohorts = cohort_order({name for one in found for name in one.reported})
    accounts = {
        account: {
            name: _counted(getattr(one, account)[name] for one in found if name in getattr(one, account))
            for name in cohorts
        }
        for account in ("accounted", "reported", "simulated")
    }
    partings = [parting for one in found for parting in one.partings]
    kinds = dict.fromkeys(parting.accounts for parting in partings)
    return Hits(**accounts, partings=[_parting([one for one in partings if one.accounts == kind]) for kind in kinds])


def _parting(found: Sequence[HitParting]) -> HitParting:
    """Add up; the example is that of the trace with most such tokens."""
    most = max(found, key=lambda one: one.tokens)
    return replace(most, requests=sum(one.requests for one in found), tokens=sum(one.tokens for one in found))


def _cache(part: MetricsPart, found: Sequence[CacheSize | None], kv_bytes_per_token: int | None) -> CacheSize | None:
    """Return the size of each engine's cache, all alike; null: no hashes, or blocks of several sizes."""
    if len(part.curves) != 1:
        return None
    (curve,) = part.curves.values()
    usable = _same([one.engine_blocks for one in found if one is not None])
    return cache_size(curve, usable, part.own, kv_bytes_per_token)


def _upstreams(part: MetricsPart, found: Sequence[Mapping[str, UpstreamMetrics]]) -> dict[str, UpstreamMetrics]:
    sums = {}
    for name in sorted({name for one in found for name in one}):
        mine = [one[name] for one in found if name in one]
        sums[name] = UpstreamMetrics(
            requests=sum(one.requests for one in mine),
            completed=sum(one.completed for one in mine),
            hits=_counted(one.hits for one in mine),
            ttft_ms=part.statistics("upstreams", name),
        )
    return sums


def _client(part: MetricsPart, found: Sequence[Client]) -> Client:
    return Client(
        lag_ms=part.statistics("client", "lag_ms"),
        limit_ms=max(one.limit_ms for one in found),
        late=sum(one.late for one in found),
        held=sum(one.held for one in found),
    )


def _health(found: Mapping[str, Sequence[HealthCheck]]) -> list[HealthCheck]:
    """Return the worst verdict of each check, in how many traces, and the figure of the first of these."""
    checks = []
    for place, name in enumerate(one.name for one in next(iter(found.values()))):
        verdicts = {trace: health[place] for trace, health in found.items()}
        worst = min((one.verdict for one in verdicts.values()), key=VERDICTS.index)
        traces = [trace for trace, one in verdicts.items() if one.verdict == worst]
        first = verdicts[traces[0]]
        figure = f"{len(traces):,} of {len(found):,} traces; {traces[0]}: {first.figure}"
        checks.append(HealthCheck(name=name, verdict=worst, figure=figure, where=first.where))
    return checks


def _judge(part: MetricsPart, slo: Slo, workload: Workload, requests: RequestCounts) -> SloResult:
    threshold, found = slo.threshold, part.sketches.get(("slos", slo.threshold.text))
    if threshold.metric in NUMBERS:
        value, n = number_of(threshold, workload, requests.success), requests.n
    elif found is None:
        value, n = None, 0
    elif threshold.percentile is not None:
        value, n = found.quantile(threshold.percentile / 100.0), found.n
    else:
        value, n = getattr(found, threshold.key or "mean"), found.n
    if value is None:
        raise InputError(f"--slo {threshold.text}: no trace has its metric; see report show of one of them")
    return judged(slo, value, n)
