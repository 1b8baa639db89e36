"""Metrics of single requests, each a column: NaN where the trace does not say."""

from collections.abc import Callable
from typing import Final

import numpy as np

from measure.metrics.results import RequestCounts
from measure.runs import STATUSES, UNKNOWN, Run
from tracefile.records.arrays import FloatArray, IntArray


def known(counts: IntArray) -> FloatArray:
    """Return counts as floats, NaN for unknown."""
    return np.where(counts == UNKNOWN, np.nan, counts)


LEAST_WHOLE: Final = 1e-9
"""Of counts and of times in ms or s; less is what a file says that no clock told."""


def ratio(part: FloatArray, whole: FloatArray) -> FloatArray:
    """Return part / whole, NaN where the whole is next to 0 or unknown."""
    return part / np.where(whole > LEAST_WHOLE, whole, np.nan)


def ttft_from_schedule_ms(run: Run) -> FloatArray:
    """Arrival + TTFT − schedule: a late client cannot hide in it."""
    return run.arrival_ms + run.ttft_ms - run.scheduled_ms


def completed_e2e_ms(run: Run) -> FloatArray:
    """Time to the end, of requests with status ok."""
    return np.where(run.ok, run.e2e_ms, np.nan)


def e2e_per_token_ms(run: Run) -> FloatArray:
    """E2E over output tokens: the normalised E2E."""
    return ratio(completed_e2e_ms(run), known(run.output_tokens))


def interactivity_tps(run: Run) -> FloatArray:
    """Tokens a second that the user of a stream sees after its first read."""
    return ratio(np.full(len(run), 1000.0), run.tpot_ms)


REQUEST_METRICS: Final[dict[str, Callable[[Run], FloatArray]]] = {
    "ttft_ms": lambda run: run.ttft_ms,
    "ttft_from_schedule_ms": ttft_from_schedule_ms,
    "itl_ms": lambda run: run.itl_ms,
    "tpot_ms": lambda run: run.tpot_ms,
    "e2e_ms": completed_e2e_ms,
    "e2e_per_token_ms": e2e_per_token_ms,
    "interactivity_tps": interactivity_tps,
    "input_tokens": lambda run: known(run.prompt_tokens),
    "output_tokens": lambda run: known(run.output_tokens),
    "turns": lambda run: known(run.turn),
}
"""Column of each metric of ``per_request``; of ``itl_ms`` a gap is a sample, else a request is."""
PER_GAP: Final = ("itl_ms",)


def success(run: Run) -> float:
    """Return the share of requests with status ok, of those that the run's own end did not cancel."""
    judged = len(run) - int(np.count_nonzero(run.cancelled))
    return int(np.count_nonzero(run.ok)) / judged if judged else 0.0


def request_counts(run: Run) -> RequestCounts:
    """Count requests by their end and by their hits."""
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
