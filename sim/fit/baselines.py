"""What anyone could predict without a simulator, on the same data: a model that does not beat these is worthless."""

import numpy as np

from sim.fit.residuals import Requests
from sim.latency.modelfile import Baseline
from tracefile.records.arrays import FloatArray


def baseline_errors(requests: Requests) -> dict[str, Baseline]:
    """One TTFT for all, and a line through the uncached tokens (least relative squares); in sample."""
    known = ~requests.censored
    seen, uncached = requests.seen_ms[known], requests.uncached_tokens[known]
    design = np.stack([np.ones(len(seen)), uncached], axis=1)
    line = np.linalg.lstsq(design / seen[:, None], np.ones(len(seen)), rcond=None)[0]
    return {
        "constant_ttft": _baseline(float(np.median(seen)), 0.0, uncached, seen),
        "linear_in_uncached_tokens": _baseline(float(line[0]), float(line[1]), uncached, seen),
    }


def _baseline(intercept_ms: float, per_token_ms: float, uncached: FloatArray, seen: FloatArray) -> Baseline:
    relative = np.abs(intercept_ms + per_token_ms * uncached - seen) / seen
    slope = f" + {per_token_ms:.4g} ms/token" if per_token_ms else ""
    return Baseline(
        formula=f"{intercept_ms:.4g} ms{slope}",
        intercept_ms=intercept_ms,
        per_uncached_token_ms=per_token_ms,
        median_abs_error=round(float(np.median(relative)), 4),
        p90_abs_error=round(float(np.quantile(relative, 0.9)), 4),
    )
