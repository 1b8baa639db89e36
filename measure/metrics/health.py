"""Health checks: signs that a run's numbers are not what they seem, each with its figure and where to look."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from measure.cohorts import UNCACHED_EDGES, own_traits
from measure.metrics.client import PLANNERS
from measure.metrics.hits import block_size
from measure.metrics.requests import request_counts
from measure.metrics.results import Client, HealthCheck, Hits, Statistics, Verdict
from measure.metrics.statistics import quantile_of
from measure.runs import UNKNOWN, Run
from measure.wording import duration, factor, rate, share, share_of
from tracefile.records.arrays import BoolArray, FloatArray, IntArray
from tracefile.records.errors import USAGE_ADVICE

BAD_SHARE: Final = 0.05
"""Share of requests from which on a fault of single requests is one of the run."""
RATE_OFF: Final = 0.05
WARM_UP_OTHERS: Final = 10
"""Other requests of a length that a first request is compared with."""
WARM_UP_FACTOR: Final = 2.0
HITS_LOST: Final = 0.05
"""Share of an unlimited cache's hits that a large enough cache may lack."""


@dataclass(frozen=True, slots=True)
class Examined:
    """Material of the checks."""

    run: Run
    client: Client
    hits: Hits

    @property
    def planned(self) -> bool:
        return self.run.meta.source in PLANNERS


def check_health(run: Run, client: Client, hits: Hits) -> list[HealthCheck]:
    """Run every check, those that a trace cannot answer included."""
    examined = Examined(run, client, hits)
    return [*(check(examined) for check in CHECKS), *_missing(examined)]


def _counted(name: str, bad: int, of: int, what: str, where: str) -> HealthCheck:
    """Return a check by the share of requests with a fault."""
    verdict: Verdict = "ok" if not bad else "bad" if bad > BAD_SHARE * of else "look"
    return HealthCheck(name=name, verdict=verdict, figure=f"{bad:,} of {of:,} {what}", where=where if bad else "")


def _unknown(name: str, figure: str, where: str = "") -> HealthCheck:
    return HealthCheck(name=name, verdict="unknown", figure=figure, where=where)


def _arrival_rate(examined: Examined) -> HealthCheck:
    name, run = "arrival rate", examined.run
    rows = ~np.isnan(run.scheduled_ms) & ~np.isnan(run.arrival_ms) & ~run.held
    planned, sent = (_per_s(times[rows]) for times in (run.scheduled_ms, run.arrival_ms))
    if not examined.planned or planned is None or sent is None:
        return _unknown(name, "no plan")
    off = abs(sent / planned - 1.0)
    verdict: Verdict = "ok" if off <= RATE_OFF else "bad"
    figure = f"{rate(sent)} requests/s sent, {rate(planned)} planned"
    return HealthCheck(name=name, verdict=verdict, figure=figure, where="" if verdict == "ok" else "lag")


def _per_s(times_ms: FloatArray) -> float | None:
    span_ms = float(np.ptp(times_ms)) if len(times_ms) > 1 else 0.0
    return (len(times_ms) - 1) / span_ms * 1000.0 if span_ms else None


def _lengths(name: str, examined: Examined, found: IntArray, planned: IntArray, where: str) -> HealthCheck:
    both = examined.run.ok & (found != UNKNOWN) & (planned != UNKNOWN)
    if not examined.planned or not both.any():
        return _unknown(name, "no plan")
    off = np.abs(found - planned)[both]
    bad = int(np.count_nonzero(off))
    most = f", by up to {int(off.max()):,} tokens" if bad else ""
    return _counted(name, bad, len(off), f"not as planned{most}", where)


def _prompt_length(examined: Examined) -> HealthCheck:
    run, where = examined.run, "chat template, tokenizer (docs/prompts.md)"
    return _lengths("prompt length", examined, run.prompt_tokens, run.planned_prompt_tokens, where)


def _output_length(examined: Examined) -> HealthCheck:
    run, where = examined.run, "ignore_eos refused, or stop strings"
    return _lengths("output length", examined, run.output_tokens, run.max_tokens, where)


def _order(examined: Examined) -> HealthCheck:
    name, run = "order in sessions", examined.run
    row_of = {request_id: row for row, request_id in enumerate(run.request_ids)}
    parents = np.array([UNKNOWN if one is None else row_of.get(one, UNKNOWN) for one in run.parents], np.int64)
    follows = parents != UNKNOWN
    if not follows.any():
        return _unknown(name, "no request names the one before it")
    early = run.arrival_ms[follows] < run.end_ms[parents[follows]]
    where = "parent_id, clocks, a writer of several processes"
    return _counted(name, int(np.count_nonzero(early)), len(early), "began before the turn before ended", where)


def check_lag(client: Client) -> HealthCheck:
    """Check how many requests were late; also for the note of a comparison."""
    name = "lag"
    if client.lag_ms is None:
        return _unknown(name, "no plan")
    late = f"late by more than {duration(client.limit_ms)}; lag p99 {duration(client.lag_ms.p99)}"
    where = "idle machine, more --procs"
    return _counted(name, client.late, client.lag_ms.n, late, where)


def _delay(name: str, found: Statistics | None, limit_ms: float, where: str) -> HealthCheck:
    if found is None:
        return _unknown(name, "not in the trace")
    verdict: Verdict = "ok" if found.p99 <= limit_ms else "look"
    return HealthCheck(
        name=name,
        verdict=verdict,
        figure=f"p99 {duration(found.p99)}, max {duration(found.max)}",
        where="" if verdict == "ok" else where,
    )


def _loop_delay(examined: Examined) -> HealthCheck:
    client = examined.client
    where = "time stamps came late: idle machine, more --procs"
    return _delay("loop delay", client.loop_delay_ms, client.limit_ms, where)


def _crossing_delay(examined: Examined) -> HealthCheck:
    client = examined.client
    where = "next turns were built late: idle machine, more --procs"
    return _delay("crossing delay", client.crossing_delay_ms, client.limit_ms, where)


def _warm_up(examined: Examined) -> HealthCheck:
    name, run = "warm-up", examined.run
    uncached = own_traits(run).uncached_tokens
    told = np.flatnonzero(~np.isnan(run.ttft_ms) & ~np.isnan(run.arrival_ms) & (uncached != UNKNOWN))
    if not len(told):
        return _unknown(name, "no TTFT with cached tokens")
    first = told[np.argmin(run.arrival_ms[told])]
    bucket = np.searchsorted(UNCACHED_EDGES, uncached, side="right")
    others = told[(bucket[told] == bucket[first]) & (told != first)]
    if len(others) < WARM_UP_OTHERS:
        return _unknown(name, f"{len(others)} other requests with as many uncached tokens as the first")
    usual_ms = quantile_of(run.ttft_ms[others], 0.99) or 0.0
    slow = run.ttft_ms[first] > WARM_UP_FACTOR * usual_ms
    ratio = f" (×{factor(run.ttft_ms[first] / usual_ms)})" if usual_ms else ""
    return HealthCheck(
        name=name,
        verdict="look" if slow else "ok",
        figure=f"first TTFT {duration(run.ttft_ms[first])}, p99 of its like {duration(usual_ms)}{ratio}",
        where="compilation, graph capture: warm the engine up" if slow else "",
    )


def _idle(examined: Examined) -> HealthCheck:
    name, run = "engine idle at start", examined.run
    both = (run.cached_tokens != UNKNOWN) & (run.reusable_tokens != UNKNOWN)
    if not both.any():
        return _unknown(name, "no hashes beside reported cached tokens")
    known: BoolArray = run.cached_tokens - run.reusable_tokens >= block_size(run)
    bad = int(np.count_nonzero(both & known))
    what, where = "hit blocks that nothing in the trace had brought", "earlier traffic: reset the cache, wait for idle"
    if (run.reusable_tokens == UNKNOWN).any():
        where = f"requests without block hashes may have brought them; else {where}"
    return _counted(name, bad, int(np.count_nonzero(both)), what, where)


def _tokenizer(examined: Examined) -> HealthCheck:
    name, run = "tokenizer", examined.run
    ok = run.ok & (run.prompt_tokens != UNKNOWN)
    if not ok.any():
        return _unknown(name, "no prompt lengths")
    bad = int(np.count_nonzero(ok & (run.tokenizer_prompt_tokens != UNKNOWN)))
    what = "prompts counted otherwise by the engine"
    return _counted(name, bad, int(np.count_nonzero(ok)), what, "--tokenizer, chat template (docs/prompts.md)")


def _hit_accounting(examined: Examined) -> HealthCheck:
    name, hits = "hit accounting", examined.hits
    reported, simulated = hits.reported.get("all"), hits.simulated.get("all")
    if reported is None or not reported.requests:
        return _unknown(name, "no cached tokens reported", USAGE_ADVICE)
    if simulated is None or not simulated.requests:
        return _unknown(name, f"reported {share(reported.rate)}, no hashes to compare with")
    lost = (simulated.rate or 0.0) - (reported.rate or 0.0)
    verdict: Verdict = "ok" if lost <= HITS_LOST * (simulated.rate or 0.0) else "look"
    kept = f" ({share_of(reported.rate or 0.0, simulated.rate or 0.0)} of it)" if lost >= 0 else ""
    figure = f"reported {share(reported.rate)} of prompt tokens, unlimited cache {share(simulated.rate)}{kept}"
    where = "cache size (sim curve), evictions (sim misses)"
    return HealthCheck(name=name, verdict=verdict, figure=figure, where="" if verdict == "ok" else where)


def _missing(examined: Examined) -> list[HealthCheck]:
    """Check each fact that requests may lack, and that numbers then leave them out for."""
    found = request_counts(examined.run)
    facts = (
        ("block hashes", found.without_hashes, found.n, "tap --tokenizer, and its last line"),
        ("usage", found.without_usage, found.completed, USAGE_ADVICE),
        ("cached tokens", found.without_cached_tokens, found.completed, USAGE_ADVICE),
        ("token times", found.without_token_times, found.completed, "responses that are not streamed have none"),
    )
    return [
        _counted(name, lacking, of, "requests have none", where)
        if lacking < of
        else _unknown(name, "in no request", where)
        for name, lacking, of, where in facts
    ]


def _success(examined: Examined) -> HealthCheck:
    run = examined.run
    failed, cancelled = (int(np.count_nonzero(one)) for one in (~run.ok & ~run.cancelled, run.cancelled))
    where = "statuses and errors; turns that did not come lower hit rates"
    return _counted("success", failed, len(run) - cancelled, "did not end well", where)


CHECKS: Final[tuple[Callable[[Examined], HealthCheck], ...]] = (
    *(_success, _arrival_rate, _prompt_length, _output_length, _order),
    lambda examined: check_lag(examined.client),
    *(_loop_delay, _crossing_delay),
    *(_warm_up, _idle, _tokenizer, _hit_accounting),
)
