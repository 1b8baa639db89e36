"""What anyone could predict without a simulator, on the same data: a model that does not beat these is worthless."""

import numpy as np

from sim.model import Baseline
from sim.residuals import Requests
from sim.timeline import Floats


def baseline_errors(requests: Requests) -> dict[str, Baseline]:
    """One TTFT for all, and a line through the uncached tokens (least relative squares); in sample."""
    known = ~requests.censored
    seen, uncached = requests.seen_ms[known], requests.uncached_tokens[known]
    constant = np.full(len(seen), float(np.median(seen)))
    design = np.stack([np.ones(len(seen)), uncached], axis=1)
    line = np.linalg.lstsq(design / seen[:, None], np.ones(len(seen)), rcond=None)[0]
    return {
        "constant_ttft": _baseline(f"{constant[0]:.4g} ms", constant, seen),
        "linear_in_uncached_tokens": _baseline(f"{line[0]:.4g} ms + {line[1]:.4g} ms/token", design @ line, seen),
    }


def _baseline(formula: str, predicted: Floats, seen: Floats) -> Baseline:
    relative = np.abs(predicted - seen) / seen
    return Baseline(
        formula=formula,
        median_abs_error=round(float(np.median(relative)), 4),
        p90_abs_error=round(float(np.quantile(relative, 0.9)), 4),
    )
