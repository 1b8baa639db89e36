"""Veeksha's files of a run, by its code's rules: seconds, quantiles interpolated, TPOT 0 for a single token."""

import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from measure.metrics.columns import Lists, Table
from measure.metrics.requests import known, ratio
from measure.metrics.sessions import SessionOrder, accounted_tokens, session_order
from measure.runs import UNKNOWN, Run
from report.files.measured import Lacking, Measured, Writer, write_json, write_jsonl
from tracefile.records.arrays import BoolArray, FloatArray, IntArray

DIGITS: Final = 5
"""Digits of seconds in ``request_level_metrics.jsonl``."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Columns of the completed requests, in seconds. Counts: UNKNOWN; times: NaN if the trace does not tell."""

    run: Run
    delta_tokens: IntArray
    """Prompt tokens beyond prompt and output of the turn before."""
    target_tokens: IntArray
    """The same, as planned."""
    ttfc: FloatArray
    tpot: FloatArray
    e2e: FloatArray
    """To the last read; of a response that was not streamed, to its end."""
    tbc: FloatArray
    """Every gap; ``run.gap_owner`` is its request."""

    @property
    def output_tokens(self) -> FloatArray:
        return known(self.run.output_tokens)

    @property
    def total_tokens(self) -> FloatArray:
        return known(self.run.prompt_tokens) + self.output_tokens


def requests_of(run: Run) -> Requests:
    """Return the completed requests; raises Lacking without one that has its times."""
    run, accounted = _completed(run)
    gap_sums = np.bincount(run.gap_owner, run.gap_ms, len(run))
    streamed = run.streamed & ~np.isnan(run.ttft_ms)
    ttfc = np.where(streamed, run.ttft_ms, run.e2e_ms) / 1000
    e2e = np.where(streamed, run.ttft_ms + gap_sums, run.e2e_ms) / 1000
    if np.isnan(e2e).all():
        raise Lacking("no completed request has its times (ttft_ms, e2e_ms)")
    both = (run.prompt_tokens != UNKNOWN) & (accounted != UNKNOWN)
    planned = both & (run.planned_prompt_tokens != UNKNOWN)
    later = run.output_tokens - 1
    return Requests(
        run=run,
        delta_tokens=np.where(both, run.prompt_tokens - accounted, UNKNOWN),
        target_tokens=np.where(planned, np.maximum(run.planned_prompt_tokens - accounted, 0), UNKNOWN),
        ttfc=ttfc,
        tpot=np.where(
            later > 0, (e2e - ttfc) / np.maximum(later, 1), np.where(run.output_tokens == UNKNOWN, np.nan, 0.0)
        ),
        e2e=e2e,
        tbc=run.gap_ms / 1000,
    )


def _completed(run: Run) -> tuple[Run, IntArray]:
    """Return the completed requests, and the prompt tokens that the turn before each already had."""
    rows = np.flatnonzero(run.ok)
    if not len(rows):
        raise Lacking("no request is complete")
    return run.select(rows), accounted_tokens(run)[rows]


def _rounded(values: FloatArray) -> FloatArray:
    return np.asarray(np.round(values, DIGITS))


def request_columns(run: Run) -> Table:
    """Return ``request_level_metrics.jsonl`` in columns; times begin with the first arrival of all requests."""
    found = requests_of(run)
    done = found.run
    begin_ms = float(np.nanmin(run.arrival_ms)) if not np.isnan(run.arrival_ms).all() else 0.0
    arrivals = _rounded((done.arrival_ms - begin_ms) / 1000)
    sizes: dict[str, int] = defaultdict(int)
    for session in run.sessions:
        sizes[session or ""] += 1
    total = found.total_tokens
    return {
        "request_id": done.request_ids,
        "session_id": done.sessions,
        "session_total_requests": np.array([1 if session is None else sizes[session] for session in done.sessions]),
        "scheduler_ready_at": _rounded((done.scheduled_ms - begin_ms) / 1000),
        "scheduler_dispatched_at": arrivals,
        "client_picked_up_at": arrivals,
        "client_completed_at": _rounded((done.end_ms - begin_ms) / 1000),
        "result_processed_at": np.full(len(done), np.nan),
        "num_delta_prompt_tokens": found.delta_tokens,
        "num_total_prompt_tokens": done.prompt_tokens,
        "target_num_delta_prompt_tokens": found.target_tokens,
        "num_output_tokens": done.output_tokens,
        "num_requested_output_tokens": done.max_tokens,
        "num_total_tokens": np.where(np.isnan(total), UNKNOWN, total).astype(np.int64),
        "is_stream": done.streamed,
        "tpot": _rounded(found.tpot),
        "ttfc": _rounded(found.ttfc),
        "end_to_end_latency": _rounded(found.e2e),
        "normalized_end_to_end_latency": _rounded(ratio(found.e2e, found.output_tokens)),
        "output_throughput": _rounded(ratio(found.output_tokens, found.e2e)),
        "tbc": Lists(_rounded(found.tbc), np.searchsorted(done.gap_owner, np.arange(len(done) + 1))),
    }


def _any_of(flags: BoolArray, order: SessionOrder) -> BoolArray:
    return np.asarray(order.total(flags[order.rows].astype(np.float64)) > 0)


def summary_stats(run: Run) -> dict[str, float]:
    """Count requests and sessions by their end; no session of a trace is incomplete."""
    order = session_order(run)
    errored, cancelled = ~run.ok & ~run.cancelled, run.cancelled
    with_cancel = _any_of(cancelled, order)
    with_error = _any_of(errored, order) & ~with_cancel
    begins_s = run.arrival_ms[order.rows[order.starts]] / 1000
    span_s = float(np.ptp(begins_s[~np.isnan(begins_s)])) if not np.isnan(begins_s).all() else 0.0
    n, sessions = len(run), len(order)
    n_errored, n_cancelled = int(np.count_nonzero(errored)), int(np.count_nonzero(cancelled))
    return {
        "Number of Requests": n,
        "Number of Completed Requests": int(np.count_nonzero(run.ok)),
        "Number of Errored Requests": n_errored,
        "Number of Cancelled Requests": n_cancelled,
        "Error Rate": n_errored / n,
        "Cancellation Rate": n_cancelled / n,
        "Number of Sessions Seen": sessions,
        "Successful Sessions": int(np.count_nonzero(~with_cancel & ~with_error)),
        "Errored Sessions": int(np.count_nonzero(with_error)),
        "Cancelled Sessions": int(np.count_nonzero(with_cancel)),
        "Incomplete Sessions": 0,
        "Observed Session Dispatch Rate": (sessions - 1) / span_s if span_s else 0.0,
    }


def throughput_metrics(run: Run) -> dict[str, float]:
    """Return 1 / mean TPOT over all completed requests, 0 for those of one token, and 1 / p99 TBC."""
    found = requests_of(run)
    if not len(found.tbc):
        raise Lacking("no gaps between tokens (itl_ms)")
    if np.isnan(found.tpot).all():
        raise Lacking("no completed request has its output length (output_tokens)")
    mean, p99 = float(np.nanmean(found.tpot)), float(np.quantile(found.tbc, 0.99))
    if not mean or not p99:
        raise Lacking("its gaps between tokens (itl_ms) are 0")
    return {"tpot_based_throughput": 1 / mean, "tbc_based_throughput": 1 / p99}


SLO_METRICS: Final = {"ttft": "ttfc", "tbc": "tbc", "tpot": "tpot", "tpot_veeksha": "tpot", "e2e": "e2e"}
"""Veeksha's name of each metric that its SLOs can limit."""


def slo_results(measured: Measured) -> dict[str, Any]:
    """Judge those SLOs of the command that Veeksha knows: an upper limit on a quantile of all requests."""
    found, results = requests_of(measured.run), []
    for slo in measured.slos:
        threshold = slo.threshold
        metric = SLO_METRICS.get(threshold.metric)
        if metric is None or threshold.percentile is None or threshold.op not in ("<=", "<") or threshold.cohort:
            continue
        values: FloatArray = getattr(found, metric)
        values = values[~np.isnan(values)]
        if not len(values):
            continue
        observed = float(np.percentile(values, threshold.percentile))
        results.append(
            {
                "met": threshold.holds(observed * 1000),
                "slo_metric_key": f"{metric}_p{threshold.percentile:g}",
                "observed_value": observed,
                "threshold": threshold.limit / 1000,
                "percentile": threshold.percentile / 100,
                "metric": metric,
                "name": slo.name or threshold.text,
                "lower_is_better": True,
            }
        )
    if not results:
        raise Lacking("needs an SLO of Veeksha's kind, as --slo 'ttft.p99<=500ms'")
    return {"all_slos_met": all(result["met"] for result in results), "results": results}


def prefill_stats(run: Run) -> dict[str, Any]:
    """Group TTFC by the prompt tokens that a turn adds: as planned or, without a plan, as counted."""
    found = requests_of(run)
    planned = bool((found.target_tokens != UNKNOWN).any())
    tokens = found.target_tokens if planned else found.delta_tokens
    tells = (tokens != UNKNOWN) & ~np.isnan(found.ttfc)
    if not tells.any():
        raise Lacking("no completed request has its prompt length (prompt_tokens)")
    order = np.argsort(tokens[tells], kind="stable")
    lengths, starts = np.unique(tokens[tells][order], return_index=True)
    groups = np.split(found.ttfc[tells][order], starts[1:])
    return {
        "metric": "ttfc",
        "group_by": "target_num_delta_prompt_tokens" if planned else "num_delta_prompt_tokens",
        "groups": {str(one): _spread(group) for one, group in zip(lengths.tolist(), groups, strict=True)},
    }


def _spread(values: FloatArray) -> dict[str, float]:
    return {
        "count": len(values),
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "std": float(values.std()),
        "min": float(values.min()),
        "max": float(values.max()),
        "p90": float(np.quantile(values, 0.9)),
        "p99": float(np.quantile(values, 0.99)),
    }


CHECK_NAMES: Final = {
    "arrival rate": "session dispatch rate",
    "order in sessions": "intra-session request arrival",
    "crossing delay": "lifecycle timing delays",
}
"""Veeksha's name of a check, where it is another than ours."""
RESULTS: Final = {"ok": "PASSED", "look": "WARNING", "bad": "FAILED", "unknown": "SKIPPED"}


def _write_health(measured: Measured, path: Path) -> None:
    """Write our health checks under Veeksha's headings."""
    rule = "=" * 60
    blocks = []
    for check in measured.metrics.health:
        title = f"{CHECK_NAMES.get(check.name, check.name)} check".upper()
        where = f"\n  Where to look: {check.where}" if check.where else ""
        blocks.append(f"{rule}\n{title}\n{rule}\nResult: {RESULTS[check.verdict]}\n\n  {check.figure}{where}\n")
    path.write_text("\n".join(blocks), encoding="utf-8")


DISTRIBUTIONS: Final = {
    "num_prompt_tokens": "Number of Prompt Tokens",
    "num_output_tokens": "Number of Output Tokens",
    "num_total_tokens": "Number of Total Tokens",
    "tpot": "Time per Output Token",
    "ttfc": "Time to First Chunk",
    "tbc": "Time Between Chunks",
    "end_to_end_latency": "End to End Latency",
    "normalized_end_to_end_latency": "Normalized End to End Latency",
    "output_throughput": "Output Throughput",
    "session_size": "Requests per Session",
    "session_duration": "Session Duration",
}
"""Column title of each ``<metric>.csv``."""
FIELDS: Final = {
    "num_prompt": "prompt_tokens",
    "num_total": "prompt_tokens and output_tokens",
    "num_output": "output_tokens",
    "tpot": "output_tokens",
    "tbc": "itl_ms",
    "normalized": "output_tokens",
    "throughput": "output_tokens",
    "session_duration": "arrival_ms and e2e_ms",
}
"""Fields that a metric needs beside times, by a part of its name."""


def distribution(run: Run, name: str) -> FloatArray:
    """Return the sample of a ``<metric>.csv``: completed requests, streamed ones for TPOT, or completed sessions."""
    if name.startswith("session_"):
        order = session_order(run)
        done = np.minimum.reduceat(run.ok[order.rows], order.starts)
        if name == "session_size":
            return np.diff(np.append(order.starts, len(order.rows)))[done].astype(np.float64)
        ends_ms = np.maximum.reduceat(run.end_ms[order.rows], order.starts)
        return np.asarray((ends_ms - run.arrival_ms[order.rows[order.starts]])[done] / 1000)
    found = requests_of(run)
    columns: dict[str, FloatArray] = {
        "num_prompt_tokens": known(found.delta_tokens),
        "num_output_tokens": found.output_tokens,
        "num_total_tokens": found.total_tokens,
        "tpot": found.tpot[found.run.streamed],
        "ttfc": found.ttfc,
        "tbc": found.tbc,
        "end_to_end_latency": found.e2e,
        "normalized_end_to_end_latency": ratio(found.e2e, found.output_tokens),
        "output_throughput": ratio(found.output_tokens, found.e2e),
    }
    return columns[name]


LEVELS: Final = tuple(np.linspace(0, 1, 101).tolist())


def _quantiles(run: Run, name: str) -> list[float]:
    values = distribution(run, name)
    values = values[~np.isnan(values)]
    if not len(values):
        needed = next((fields for part, fields in FIELDS.items() if part in name), "ttft_ms or e2e_ms")
        raise Lacking(f"no completed request or session has {needed}")
    found: list[float] = np.quantile(values, LEVELS, method="lower").tolist()
    return found


def _distribution_writer(name: str, title: str) -> Writer:
    def write(measured: Measured, path: Path) -> None:
        rows = zip(range(len(LEVELS)), LEVELS, _quantiles(measured.run, name), strict=True)
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["", "cdf", title])
            writer.writerows(rows)

    return write


FILES: dict[str, Writer] = {
    "veeksha/health_check_results.txt": _write_health,
    "veeksha/metrics/request_level_metrics.jsonl": lambda measured, path: write_jsonl(
        request_columns(measured.run), path
    ),
    "veeksha/metrics/summary_stats.json": lambda measured, path: write_json(path, summary_stats(measured.run)),
    "veeksha/metrics/throughput_metrics.json": lambda measured, path: write_json(
        path, throughput_metrics(measured.run)
    ),
    "veeksha/metrics/slo_results.json": lambda measured, path: write_json(path, slo_results(measured)),
    "veeksha/metrics/prefill_stats.json": lambda measured, path: write_json(path, prefill_stats(measured.run)),
    **{f"veeksha/metrics/{name}.csv": _distribution_writer(name, title) for name, title in DISTRIBUTIONS.items()},
}
"""Writers by file name."""
