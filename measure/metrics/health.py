"""Health checks of a run's latencies, tokens and prefix hits: each with a figure and advice."""

from typing import Final

import numpy as np

from measure.metrics.requests import request_counts
from measure.metrics.results import Client, HealthCheck, Hits, Verdict
from measure.number_format import duration, share, share_of
from measure.runs import Run
from tracefile.records.errors import USAGE_ADVICE

BAD_SHARE: Final = 0.05
"""Share of faulty requests from which on the run is bad."""
HITS_LOST: Final = 0.05
"""Share of an unlimited cache's prefix hits that may be missing without a warning."""


def check_health(run: Run, client: Client, hits: Hits) -> list[HealthCheck]:
    """Run all checks: success, client lag, prefix hits, missing token counts and times."""
    return [_success(run), check_lag(client), _hit_accounting(hits), *_missing(run)]


def _counted(name: str, bad: int, of: int, what: str, where: str) -> HealthCheck:
    """Return a check on the share of faulty requests."""
    verdict: Verdict = "ok" if not bad else "bad" if bad > BAD_SHARE * of else "warning"
    return HealthCheck(name=name, verdict=verdict, figure=f"{bad:,} of {of:,} {what}", where=where if bad else "")


def _unknown(name: str, figure: str, where: str = "") -> HealthCheck:
    return HealthCheck(name=name, verdict="unknown", figure=figure, where=where)


def check_lag(client: Client) -> HealthCheck:
    """Check the number of late requests, whose latencies are unreliable."""
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
    verdict: Verdict = "ok" if lost <= HITS_LOST * (simulated.rate or 0.0) else "warning"
    reached = f" ({share_of(reported.rate or 0.0, simulated.rate or 0.0)} of it)" if lost >= 0 else ""
    figure = f"reported {share(reported.rate)} of prompt tokens, unlimited cache {share(simulated.rate)}{reached}"
    where = "cache size (sim curve), evictions (sim misses)"
    return HealthCheck(name=name, verdict=verdict, figure=figure, where="" if verdict == "ok" else where)


def _missing(run: Run) -> list[HealthCheck]:
    """Check for missing block hashes, token counts and token times, without which metrics skip a request."""
    counts = request_counts(run)
    facts = (
        ("block hashes", counts.without_hashes, counts.n, "tap --tokenizer, and its last line"),
        ("usage", counts.without_usage, counts.completed, USAGE_ADVICE),
        ("cached tokens", counts.without_cached_tokens, counts.completed, USAGE_ADVICE),
        ("token times", counts.without_token_times, counts.completed, "responses that are not streamed have none"),
    )
    return [
        _counted(name, missing, of, "requests have none", where)
        if missing < of
        else _unknown(name, "in no request", where)
        for name, missing, of, where in facts
    ]


def _success(run: Run) -> HealthCheck:
    failed, cancelled = (int(np.count_nonzero(rows)) for rows in (~run.ok & ~run.cancelled, run.cancelled))
    where = "statuses and errors; turns that did not come lower hit rates"
    return _counted("success", failed, len(run) - cancelled, "did not end well", where)
