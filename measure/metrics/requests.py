"""Metrics per request as columns: latencies, tokens, rates. NaN: not recorded."""

from collections.abc import Callable
from typing import Final

import numpy as np

from measure.metrics.results import RequestCounts
from measure.runs import STATUSES, UNKNOWN, Run
from tracefile.records.arrays import FloatArray, IntArray


def nan_if_unknown(counts: IntArray) -> FloatArray:
    """Return token counts as floats, NaN for UNKNOWN."""
    return np.where(counts == UNKNOWN, np.nan, counts)


LEAST_DENOMINATOR: Final = 1e-9
"""Smallest denominator of a rate, in counts, ms or s: smaller times are malformed."""


def ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """Return numerator / denominator, NaN for a denominator that is close to 0 or unknown."""
    return numerator / np.where(denominator > LEAST_DENOMINATOR, denominator, np.nan)


def ttft_from_schedule_ms(run: Run) -> FloatArray:
    """Return TTFT from the schedule, in ms: includes the lag of a late client."""
    return run.arrival_ms + run.ttft_ms - run.scheduled_ms


def completed_e2e_ms(run: Run) -> FloatArray:
    """Return E2E latency of requests with status ok, in ms."""
    return np.where(run.ok, run.e2e_ms, np.nan)


def e2e_per_token_ms(run: Run) -> FloatArray:
    """Return normalised latency: E2E latency per output token, in ms."""
    return ratio(completed_e2e_ms(run), nan_if_unknown(run.output_tokens))


def interactivity_tps(run: Run) -> FloatArray:
    """Return tokens per second of a stream after its first read, 1000 / TPOT."""
    return ratio(np.full(len(run), 1000.0), run.tpot_ms)


REQUEST_METRICS: Final[dict[str, Callable[[Run], FloatArray]]] = {
    "ttft_ms": lambda run: run.ttft_ms,
    "ttft_from_schedule_ms": ttft_from_schedule_ms,
    "itl_ms": lambda run: run.itl_ms,
    "tpot_ms": lambda run: run.tpot_ms,
    "e2e_ms": completed_e2e_ms,
    "e2e_per_token_ms": e2e_per_token_ms,
    "interactivity_tps": interactivity_tps,
    "input_tokens": lambda run: nan_if_unknown(run.prompt_tokens),
    "output_tokens": lambda run: nan_if_unknown(run.output_tokens),
    "turns": lambda run: nan_if_unknown(run.turn),
}
"""Column of each metric of ``per_request``: a value per request; ``itl_ms``: a value per gap."""
PER_GAP: Final = ("itl_ms",)


def success(run: Run) -> float:
    """Return the share of requests with status ok, without requests cancelled at the end of the run."""
    total = len(run) - int(np.count_nonzero(run.cancelled))
    return int(np.count_nonzero(run.ok)) / total if total else 0.0


def request_counts(run: Run) -> RequestCounts:
    """Count requests by status, prefix hit and missing token counts."""
    counted = np.bincount(run.status, minlength=len(STATUSES)).tolist()
    reported = run.cached_tokens != UNKNOWN
    no_usage = (run.prompt_tokens == UNKNOWN) | (run.output_tokens == UNKNOWN)
    n_reported, cancelled = int(np.count_nonzero(reported)), int(np.count_nonzero(run.cancelled))
    return RequestCounts(
        n=len(run),
        completed=counted[0],
        cancelled=cancelled,
        success=success(run),
        statuses={status: count for status, count in zip(STATUSES, counted, strict=True) if count},
        hit_reported=n_reported,
        with_hit=int(np.count_nonzero(run.cached_tokens > 0)) / n_reported if n_reported else None,
        without_hashes=int(np.count_nonzero(run.reusable_tokens == UNKNOWN)),
        without_usage=int(np.count_nonzero(run.ok & no_usage)),
        without_cached_tokens=int(np.count_nonzero(run.ok & ~reported)),
        without_token_times=int(np.count_nonzero(run.ok & ~run.streamed & np.isnan(run.ttft_ms))),
    )
