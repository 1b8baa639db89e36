"""Metrics per session: latency, TTFT, decode throughput, prefix hits. A request without a session is a session."""

from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from measure.metrics.requests import interactivity_tps, nan_if_unknown, ratio
from measure.metrics.results import SessionUse
from measure.metrics.statistics import quantile_of
from measure.resampling import busy_units
from measure.runs import Run
from tracefile.records.arrays import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class SessionOrder:
    """Order of requests by session, then by arrival."""

    rows: IntArray
    """Row of the run at each position."""
    starts: IntArray
    """Position of each session's first request."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lasts(self) -> IntArray:
        """Position of each session's last request."""
        return np.append(self.starts[1:], len(self.rows)) - 1

    @property
    def is_first(self) -> BoolArray:
        first = np.zeros(len(self.rows), np.bool_)
        first[self.starts] = True
        return first

    def total(self, values: FloatArray) -> FloatArray:
        """Return sums by session of values by position; NaN counts as 0."""
        return np.asarray(np.add.reduceat(np.nan_to_num(values), self.starts))


@dataclass(frozen=True, slots=True)
class Sessions:
    """Latency, decode throughput and prefix hit rate by session, in order of first rows; NaN: unknown."""

    completed: BoolArray
    """True: all requests ended with status ok."""
    latency_ms: FloatArray
    ttft_ms: FloatArray
    ttfat_ms: FloatArray
    decode_tps: FloatArray
    hit_rate: FloatArray
    requests: FloatArray


def session_order(run: Run) -> SessionOrder:
    """Order the requests by session and arrival."""
    numbers: dict[str, int] = {}
    codes = np.empty(len(run), np.int64)
    for row, session in enumerate(run.sessions):
        codes[row] = row if session is None else numbers.setdefault(session, row)
    rows = np.lexsort((run.arrival_ms, codes))
    ordered = codes[rows]
    return SessionOrder(rows, np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])))


def busy_periods(run: Run) -> IntArray:
    """Return the bootstrap unit of each request: sessions that overlap in the queue are a unit."""
    order = session_order(run)
    session = np.empty(len(run), np.int64)
    session[order.rows] = np.cumsum(order.is_first) - 1
    return busy_units(run.arrival_ms, np.where(np.isnan(run.ttft_ms), run.e2e_ms, run.ttft_ms), session)


def measure_sessions(run: Run) -> Sessions:
    """Measure latency, decode throughput and prefix hits of each session."""
    order = session_order(run)
    rows, lasts = order.rows, order.rows[order.lasts]
    firsts = rows[order.starts]
    begins_ms = run.arrival_ms[firsts]
    ends_ms = np.maximum.reduceat(run.end_ms[rows], order.starts)
    decode_tps = interactivity_tps(run)[rows]
    return Sessions(
        completed=np.minimum.reduceat(run.ok[rows], order.starts),
        latency_ms=ends_ms - begins_ms,
        ttft_ms=run.ttft_ms[firsts],
        ttfat_ms=run.arrival_ms[lasts] + run.ttft_ms[lasts] - begins_ms,
        decode_tps=ratio(order.total(decode_tps), order.total((~np.isnan(decode_tps)).astype(np.float64))),
        requests=np.diff(np.append(order.starts, len(rows))).astype(np.float64),
        hit_rate=_hit_rates(run, order),
    )


def _hit_rates(run: Run, order: SessionOrder) -> FloatArray:
    prompt, cached = nan_if_unknown(run.prompt_tokens)[order.rows], nan_if_unknown(run.cached_tokens)[order.rows]
    both = ~np.isnan(prompt) & ~np.isnan(cached)
    return ratio(order.total(np.where(both, cached, 0.0)), order.total(np.where(both, prompt, 0.0)))


def session_uses(run: Run) -> list[SessionUse]:
    """Return prompt tokens and prefix hits by session, most cached tokens first."""
    order = session_order(run)
    prompt, cached = nan_if_unknown(run.prompt_tokens)[order.rows], nan_if_unknown(run.cached_tokens)[order.rows]
    rates = _hit_rates(run, order)
    prompts, served = order.total(prompt), order.total(cached)
    uses = [
        SessionUse(
            session_id=run.sessions[rows[0]] or run.request_ids[rows[0]],
            requests=len(rows),
            prompt_tokens=int(prompts[index]),
            cached_tokens=int(served[index]),
            hit_rate=None if np.isnan(rates[index]) else float(rates[index]),
            ttft_p50_ms=quantile_of(run.ttft_ms[rows], 0.5),
        )
        for index, rows in enumerate(np.split(order.rows, order.starts[1:]))
    ]
    return sorted(uses, key=lambda use: -use.cached_tokens)


SESSION_METRICS: Final = tuple(metric.name for metric in fields(Sessions) if metric.name != "completed")
