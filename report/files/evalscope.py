"""evalscope's files of a multi-turn run, by its rules: quantiles interpolated, unknown token counts taken as 0."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from measure.metrics.requests import known, ratio
from measure.metrics.sessions import measure_sessions, session_order
from measure.metrics.workload import WARM_UP_SHARE, WINDOW_S, rates, wall
from measure.runs import Run
from report.files.measured import Lacking, Measured, Writer, write_json
from tracefile.records.arrays import FloatArray

QUANTILES: Final = (50, 90, 95, 99)


def zero_unknown(run: Run) -> Run:
    """Return the run with 0 for each count of tokens that the trace does not tell."""
    counts = ("prompt_tokens", "cached_tokens", "output_tokens")
    return replace(run, **{name: np.maximum(getattr(run, name), 0) for name in counts})


def _write_trace_summary(measured: Measured, path: Path) -> None:
    write_json(path, trace_summary(measured.run))


def trace_summary(run: Run) -> dict[str, Any]:
    """Return the metrics of sessions over their completed requests; a request without a session is left out."""
    rows = np.flatnonzero(run.ok & np.array([session is not None for session in run.sessions]))
    if not len(rows):
        raise Lacking("no completed request has a session (session_id)")
    turns = zero_unknown(run.select(rows))
    if np.isnan(turns.e2e_ms).all() or np.isnan(turns.arrival_ms).all():
        raise Lacking("no completed request has its times (arrival_ms, e2e_ms)")
    found = measure_sessions(turns)
    columns = {
        "Latency (s)": found.latency_ms / 1000,
        "First-Turn TTFT (s)": found.ttft_ms / 1000,
        "TTFAT (s)": found.ttfat_ms / 1000,
        "Decode TPS": decode_tps(turns),
        "Cache Hit Rate (%)": np.nan_to_num(found.hit_rate) * 100,
        "Eligible Cache Hit Rate (%)": np.nan_to_num(found.eligible_hit_rate_evalscope) * 100,
    }
    return {"n_traces": len(found.completed), "rows": [_row(name, values) for name, values in columns.items()]}


def decode_tps(turns: Run) -> FloatArray:
    """Return, by session, the mean of (output − 1) / (E2E − TTFT); 0 without such a request."""
    order = session_order(turns)
    pace = ratio(known(turns.output_tokens) - 1, (turns.e2e_ms - turns.ttft_ms) / 1000)
    pace = np.where(turns.output_tokens > 1, pace, np.nan)[order.rows]
    return np.nan_to_num(ratio(order.total(pace), order.total((~np.isnan(pace)).astype(np.float64))))


def _row(name: str, values: FloatArray) -> dict[str, Any]:
    values = values[~np.isnan(values)]
    if not len(values):
        raise Lacking(f"{name}: no session has it; expected streamed requests with ends")
    quantiles = {f"p{level}": float(np.percentile(values, level)) for level in QUANTILES}
    return {
        "metric": name,
        "mean": float(values.mean()),
        "min": float(values.min()),
        **quantiles,
        "max": float(values.max()),
    }


def _points(run: Run) -> list[dict[str, Any]]:
    """Return tokens of completed requests up to each end; other requests have points of their own."""
    begin_ms, _ = wall(run)
    zeroed = zero_unknown(run)
    ends = np.flatnonzero(~np.isnan(run.end_ms))
    ends = ends[np.argsort(run.end_ms[ends], kind="stable")]
    new = np.maximum(zeroed.prompt_tokens - zeroed.cached_tokens, 0)
    counts = {"cum_completion": zeroed.output_tokens, "cum_new_prompt": new, "cum_cached_prompt": zeroed.cached_tokens}
    columns = {name: np.cumsum(np.where(run.ok, tokens, 0)[ends]).tolist() for name, tokens in counts.items()}
    columns = {"t": np.round((run.end_ms[ends] - begin_ms) / 1000, 6).tolist(), **columns}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _begin_s(run: Run) -> float:
    begin_ms, wall_s = wall(run)
    if not wall_s:
        raise Lacking("no request has its times (arrival_ms, e2e_ms)")
    return begin_ms / 1000


def _write_timeline(measured: Measured, path: Path) -> None:
    write_json(path, {"wall_start": _begin_s(measured.run), "points": _points(measured.run)})


def _write_throughput(measured: Measured, path: Path) -> None:
    write_json(path, throughput(measured.run))


def throughput(run: Run) -> dict[str, Any]:
    """Return tokens a second; a steady state without an end before it, or of one request, is the overall rate."""
    begin_s = _begin_s(run)
    ends_s = run.end_ms[~np.isnan(run.end_ms)] / 1000 - begin_s
    wall_s = wall(run)[1]
    overall_only = len(ends_s) < 2 or float(ends_s.min()) > WARM_UP_SHARE * wall_s
    zeroed = zero_unknown(run)
    cached = zeroed.cached_tokens.astype(np.float64)
    new = np.maximum(zeroed.prompt_tokens - cached, 0.0)
    tokens = {"Total Prompt": new + cached, "New Prompt": new, "Cached Prompt": cached}
    tokens["Completion"] = zeroed.output_tokens.astype(np.float64)
    rows = []
    for name, counts in tokens.items():
        found = rates(run, counts, None)
        steady = found.overall if overall_only else found.steady
        row = {"overall": found.overall, "last_window": found.last_30s, "steady_state": steady}
        rows.append({"metric": f"{name} tok/s", **{window: rate or 0.0 for window, rate in row.items()}})
    return {
        "n_samples": int(np.count_nonzero(run.ok & ~np.isnan(run.end_ms))),
        "wall_time_s": round(wall_s, 4),
        "last_window_s": WINDOW_S,
        "warmup_frac": WARM_UP_SHARE,
        "rows": rows,
    }


FILES: dict[str, Writer] = {
    "evalscope/trace_summary.json": _write_trace_summary,
    "evalscope/workload_throughput.json": _write_throughput,
    "evalscope/workload_timeline.json": _write_timeline,
}
"""Writers by file name."""
