"""All metrics of one trace."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from measure.metrics.client import measure_client
from measure.metrics.health import check_health
from measure.metrics.hits import count_hits, measure_prefill, measure_upstreams
from measure.metrics.requests import REQUEST_METRICS, known, request_counts
from measure.metrics.results import SessionCounts, Statistics, TraceMetrics
from measure.metrics.sessions import SESSION_METRICS, expected_tokens, measure_sessions, session_order
from measure.metrics.slos import Slo, check_slos, goodput
from measure.metrics.statistics import statistics_of
from measure.metrics.workload import measure_workload
from measure.runs import Run, load_run
from tracefile.records.arrays import FloatArray
from tracefile.records.extras import is_lacking

if TYPE_CHECKING:
    from measure.metrics.prefixcache import CacheStudy


def read_run(path: Path) -> Run:
    """Read a trace with what its metrics need; raises InputError if it has no records.

    Without numba the run has no chains, so that its report lacks the hits at every cache size.
    """
    return load_run(path.name, path, named=False, reuse=True, chains=not is_lacking("numba"))


def study_chains(run: Run, kv_bytes_per_token: int | None = None) -> "CacheStudy | None":
    """Return hits at every size; null: the run was read without block hashes, or has none."""
    if run.chains is None:
        return None
    from measure.metrics.prefixcache import study_cache  # noqa: PLC0415 - numba, for traces with hashes alone

    return study_cache(run, run.chains, kv_bytes_per_token)


def measure_run(
    run: Run,
    *,
    gpus: int | None = None,
    slos: Sequence[Slo] = (),
    study: "CacheStudy | None" = None,
) -> TraceMetrics:
    """Measure a run; raises InputError if it lacks the metric of an SLO. ``gpus``: null for the header's number.

    ``study``: of its chains, if it is known already.
    """
    study = study or study_chains(run)
    engine = run.meta.engine
    per_request = _per_request(run)
    workload = measure_workload(run, gpus or (engine.gpus if engine else None))
    workload = msgspec.structs.replace(workload, goodput=goodput(run, slos))
    client, hits, sessions = measure_client(run), count_hits(run), measure_sessions(run)
    completed = int(sessions.completed.sum())
    return TraceMetrics(
        source=run.meta.source,
        engine=" ".join(filter(None, [engine.name, engine.version])) or None if engine else None,
        model=run.meta.model,
        requests=request_counts(run),
        per_request=per_request,
        sessions=SessionCounts(
            n=len(sessions.completed),
            completed=completed,
            per_s=completed / workload.wall_s if workload.wall_s else None,
        ),
        per_session={name: statistics_of(getattr(sessions, name)[sessions.completed]) for name in SESSION_METRICS},
        shape=measure_shape(run),
        workload=workload,
        prefill=measure_prefill(run),
        hits=hits,
        cache=None if study is None else study.size,
        upstreams=measure_upstreams(run),
        client=client,
        health=check_health(run, client, hits),
        slos=check_slos(run, slos, workload),
    )


def _per_request(run: Run) -> dict[str, Statistics | None]:
    found = {name: statistics_of(values(run)) for name, values in REQUEST_METRICS.items() if name != "tbc_ms"}
    # One token a read, as nearly always: then gaps are ITLs, and a million requests have too many to sort twice.
    same = run.itl_ms is run.gap_ms
    tbc = found["itl_ms"] if same else statistics_of(REQUEST_METRICS["tbc_ms"](run))
    return {name: tbc if name == "tbc_ms" else found[name] for name in REQUEST_METRICS}


def measure_shape(run: Run) -> dict[str, Statistics | None]:
    """Measure every session, its failed requests included; null where the trace tells none."""
    return {name: statistics_of(sample) for name, sample in shape_samples(run).items()}


def shape_samples(run: Run) -> dict[str, FloatArray]:
    """Return each axis's values, NaN where the trace tells none."""
    order = session_order(run)
    rows, first = order.rows, order.is_first
    last = np.append(first[1:], True)
    prompt, output = known(run.prompt_tokens)[rows], known(run.output_tokens)[rows]
    pause_ms = run.arrival_ms[rows] - np.append(np.nan, run.end_ms[rows][:-1])
    return {
        "turns": np.diff(np.append(order.starts, len(rows))).astype(np.float64),
        "first_prompt_tokens": prompt[first],
        "turn_output_tokens": output[~last],
        "appended_tokens": _from_zero((prompt - expected_tokens(run, order))[~first]),
        "pause_ms": _from_zero(pause_ms[~first]),
        "final_output_tokens": output[last],
    }


def _from_zero(values: FloatArray) -> FloatArray:
    """Return NaN for a prompt that was cut down, and for a request sent before the end of the one before."""
    return np.where(values >= 0, values, np.nan)
