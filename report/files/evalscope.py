"""evalscope's files of a multi-turn run, by its rules: quantiles interpolated, unknown token counts taken as 0."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from measure.metrics.requests import known, ratio
from measure.metrics.sessions import measure_sessions, session_order
from measure.metrics.workload import WARM_UP_SHARE, WINDOW_S
from measure.runs import Run
from report.files.measured import Lacking, Measured, Writer, write_json
from tracefile.records.arrays import FloatArray, IntArray

QUANTILES: Final = (50, 90, 95, 99)


def zero_unknown(run: Run) -> Run:
    """Return the run with 0 for each count of tokens that the trace does not tell."""
    counts = ("prompt_tokens", "cached_tokens", "output_tokens")
    return replace(run, **{name: np.maximum(getattr(run, name), 0) for name in counts})


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


@dataclass(frozen=True, slots=True)
class Points:
    """Tokens of the completed requests, summed up to each end."""

    begin_ms: float
    """Arrival of the first request to end."""
    t: FloatArray
    """Seconds from there to each end."""
    cum_completion: IntArray
    cum_new_prompt: IntArray
    cum_cached_prompt: IntArray

    def rates_from(self, place: int | None) -> list[float]:
        """Return tokens a second from the point at ``place`` (None: the beginning) to the last: total prompt first."""
        curves = (self.cum_new_prompt, self.cum_cached_prompt, self.cum_completion)
        span_s = self.t[-1] - (0.0 if place is None else self.t[place])
        new, cached, completion = (
            float((curve[-1] - (0 if place is None else curve[place])) / span_s) if span_s > 0 else 0.0
            for curve in curves
        )
        return [new + cached, new, cached, completion]

    def latest(self, until_s: float) -> int:
        """Return the place of the last end until a time, of the first end if there is none."""
        return max(0, int(np.searchsorted(self.t, until_s, side="right")) - 1)


def points_of(run: Run) -> Points:
    """Return the points; raises Lacking without an end."""
    ends = np.flatnonzero(run.ok & ~np.isnan(run.end_ms))
    if not len(ends):
        raise Lacking("no completed request has its times (arrival_ms, e2e_ms)")
    done = zero_unknown(run.select(ends[np.argsort(run.end_ms[ends], kind="stable")]))
    begin_ms = float(done.arrival_ms[0])
    return Points(
        begin_ms=begin_ms,
        t=(done.end_ms - begin_ms) / 1000,
        cum_completion=np.cumsum(done.output_tokens),
        cum_new_prompt=np.cumsum(np.maximum(done.prompt_tokens - done.cached_tokens, 0)),
        cum_cached_prompt=np.cumsum(done.cached_tokens),
    )


def _write_timeline(measured: Measured, path: Path) -> None:
    points = points_of(measured.run)
    columns: dict[str, list[Any]] = {"t": np.round(points.t, 6).tolist()}
    columns |= {
        name: getattr(points, name).tolist() for name in ("cum_completion", "cum_new_prompt", "cum_cached_prompt")
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    write_json(path, {"wall_start": points.begin_ms / 1000, "points": rows})


def throughput(run: Run) -> dict[str, Any]:
    """Return tokens a second; a window begins at the last end before it, the first of all if there is none."""
    points = points_of(run)
    wall_s = max(float(points.t[-1]), 0.0)
    overall = points.rates_from(None)
    last = overall if wall_s <= WINDOW_S else points.rates_from(points.latest(wall_s - WINDOW_S))
    warm = points.latest(WARM_UP_SHARE * wall_s)
    steady = overall if warm == len(points.t) - 1 else points.rates_from(warm)
    names = ("Total Prompt", "New Prompt", "Cached Prompt", "Completion")
    return {
        "n_samples": len(points.t),
        "wall_time_s": round(wall_s, 4),
        "last_window_s": WINDOW_S,
        "warmup_frac": WARM_UP_SHARE,
        "rows": [
            {"metric": f"{name} tok/s", "overall": one, "last_window": two, "steady_state": three}
            for name, one, two, three in zip(names, overall, last, steady, strict=True)
        ],
    }


FILES: dict[str, Writer] = {
    "evalscope/trace_summary.json": lambda measured, path: write_json(path, trace_summary(measured.run)),
    "evalscope/workload_throughput.json": lambda measured, path: write_json(path, throughput(measured.run)),
    "evalscope/workload_timeline.json": _write_timeline,
}
"""Writers by file name."""
