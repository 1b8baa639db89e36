"""All metrics of a trace: latency, throughput, prefix hits, cache size, health checks, SLOs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from measure.metrics.client import measure_client
from measure.metrics.health import check_health
from measure.metrics.hits import count_hits, measure_prefill, measure_upstreams
from measure.metrics.requests import REQUEST_METRICS, request_counts
from measure.metrics.results import SessionCounts, TraceMetrics
from measure.metrics.sessions import SESSION_METRICS, measure_sessions
from measure.metrics.slos import check_slos, goodput
from measure.metrics.statistics import statistics_of
from measure.metrics.workload import measure_workload
from measure.runs import Run, load_run
from measure.thresholds import Threshold

if TYPE_CHECKING:
    from measure.metrics.prefixcache import CacheAnalysis


def read_run(path: Path) -> Run:
    """Read a trace with block hashes for its metrics. Raises InputError if it has no records."""
    return load_run(path.name, path, named=False, reuse=True, chains=True)


def analyse_chains(run: Run, kv_bytes_per_token: int | None = None) -> "CacheAnalysis | None":
    """Return prefix hits at every cache size; null: the run has no block hashes."""
    if run.chains is None:
        return None
    from measure.metrics.prefixcache import analyse_cache  # noqa: PLC0415 - for traces with hashes alone

    return analyse_cache(run, run.chains, kv_bytes_per_token)


def measure_run(
    run: Run,
    *,
    gpus: int | None = None,
    slos: Sequence[Threshold] = (),
    analysis: "CacheAnalysis | None" = None,
) -> TraceMetrics:
    """Measure latency, throughput and prefix hits of a run. Raises InputError if it lacks the metric of an SLO.

    ``gpus``: null: from the header. ``analysis``: prefix cache analysis of the run, if already computed.
    """
    analysis = analysis or analyse_chains(run)
    engine = run.meta.engine
    workload = measure_workload(run, gpus or (engine.gpus if engine else None))
    workload = msgspec.structs.replace(workload, goodput=goodput(run, slos))
    client, hits, sessions = measure_client(run), count_hits(run), measure_sessions(run)
    completed = int(sessions.completed.sum())
    return TraceMetrics(
        source=run.meta.source,
        engine=" ".join(filter(None, [engine.name, engine.version])) or None if engine else None,
        model=run.meta.model,
        requests=request_counts(run),
        per_request={name: statistics_of(values(run)) for name, values in REQUEST_METRICS.items()},
        sessions=SessionCounts(
            n=len(sessions.completed),
            completed=completed,
            per_s=completed / workload.wall_s if workload.wall_s else None,
        ),
        per_session={name: statistics_of(getattr(sessions, name)[sessions.completed]) for name in SESSION_METRICS},
        workload=workload,
        prefill=measure_prefill(run),
        hits=hits,
        cache=None if analysis is None else analysis.size,
        upstreams=measure_upstreams(run),
        client=client,
        health=check_health(run, client, hits),
        slos=check_slos(run, slos, workload),
    )
