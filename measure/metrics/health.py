"""Health checks: signs that a run's numbers are not what they seem, each with its figure and where to look."""

from typing import Final

import numpy as np

from measure.metrics.requests import request_counts
from measure.metrics.results import Client, HealthCheck, Hits, Verdict
from measure.number_format import duration, share, share_of
from measure.runs import Run
from tracefile.records.errors import USAGE_ADVICE

BAD_SHARE: Final = 0.05
"""Share of requests from which on a fault of single requests is one of the run."""
HITS_LOST: Final = 0.05
"""Share of an unlimited cache's hits that a large enough cache may lack."""


def check_health(run: Run, client: Client, hits: Hits) -> list[HealthCheck]:
    """Run every check, those that a trace cannot answer included."""
    return [_success(run), check_lag(client), _hit_accounting(hits), *_missing(run)]


def _counted(name: str, bad: int, of: int, what: str, where: str) -> HealthCheck:
    """Return a check by the share of requests with a fault."""
    verdict: Verdict = "ok" if not bad else "bad" if bad > BAD_SHARE * of else "look"
    return HealthCheck(name=name, verdict=verdict, figure=f"{bad:,} of {of:,} {what}", where=where if bad else "")


def _unknown(name: str, figure: str, where: str = "") -> HealthCheck:
    return HealthCheck(name=name, verdict="unknown", figure=figure, where=where)


def check_lag(client: Client) -> HealthCheck:
    """Check how many requests were late; also for the note of a comparison."""
    name = "lag"
    if client.lag_ms is None:
        return _unknown(name, "no plan")
    late = f"late by more than {duration(client.limit_ms)}; lag p99 {duration(client.lag_ms.p99)}"
    where = "idle machine, more --procs"
    return _counted(name, client.late, client.lag_ms.n, late, where)


def _hit_accounting(hits: Hits) -> HealthCheck:
    name = "hit accounting"
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


def _missing(run: Run) -> list[HealthCheck]:
    """Check each fact that requests may lack, and that numbers then leave them out for."""
    found = request_counts(run)
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


def _success(run: Run) -> HealthCheck:
    failed, cancelled = (int(np.count_nonzero(one)) for one in (~run.ok & ~run.cancelled, run.cancelled))
    where = "statuses and errors; turns that did not come lower hit rates"
    return _counted("success", failed, len(run) - cancelled, "did not end well", where)
