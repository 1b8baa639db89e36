"""Residuals of a fit's TTFTs: errors by cohort, and those of a baseline."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from measure.quantiles import quantile
from sim.latency.modelfile import Baseline
from tracefile.records.arrays import BoolArray, FloatArray, IntArray
from tracefile.records.schema import Record

_LEAST_CELL = 5


@dataclass(frozen=True, slots=True)
class Requests:
    """The TTFTs of a fit, with what may explain an error; all of shape (n,)."""

    request: IntArray
    seen_ms: FloatArray
    predicted_ms: FloatArray
    censored: BoolArray
    prompt_tokens: FloatArray
    cached_tokens: FloatArray

    @property
    def uncached_tokens(self) -> FloatArray:
        return self.prompt_tokens - self.cached_tokens

    @property
    def loss(self) -> float:
        """Mean of min(|log(seen / predicted)|, 1); NaN: none was seen."""
        known = ~self.censored
        ratio = np.maximum(self.seen_ms[known], 1e-6) / np.maximum(self.predicted_ms[known], 1e-6)
        return float(np.minimum(np.abs(np.log(ratio)), 1.0).mean()) if known.any() else float("nan")


def requests_of(
    records: Sequence[Record], cached_tokens: Sequence[int], predicted_ms: Sequence[float | None]
) -> Requests:
    """Return a row per TTFT that was predicted, and seen or censored."""
    rows = [
        (place, record.ttft_ms or record.e2e_ms or 0.0, predicted, record.ttft_ms is None)
        for place, (record, predicted) in enumerate(zip(records, predicted_ms, strict=True))
        if predicted is not None and (record.ttft_ms is not None or _left(record))
    ]
    places = [place for place, *_ in rows]
    return Requests(
        np.array(places, dtype=np.int64),
        np.array([seen_ms for _, seen_ms, _, _ in rows]),
        np.array([predicted for _, _, predicted, _ in rows]),
        np.array([censored for *_, censored in rows], dtype=np.bool_),
        np.array([float(records[place].prompt_tokens or 0) for place in places]),
        np.array([float(cached_tokens[place]) for place in places]),
    )


def _left(record: Record) -> bool:
    return record.status not in {"ok", "error"} and record.e2e_ms is not None


@dataclass(frozen=True, slots=True)
class Errors:
    """In-sample errors of a cohort's TTFT, before calibration, as fractions; negative: predicted too early."""

    cohort: str
    requests: int
    median_abs: float
    """Median over requests of |predicted − seen| / seen."""
    bias: float
    """Median over requests of (predicted − seen) / seen."""


def cohort_errors(requests: Requests) -> list[Errors]:
    uncached, cached = requests.uncached_tokens, requests.cached_tokens
    cohorts = {"all": np.ones(len(cached), dtype=np.bool_), "cold": cached == 0, "warm": cached > 0}
    for low, high in ((0, 256), (256, 1024), (1024, 4096), (4096, 1 << 62)):
        name = f"uncached {low}–{high - 1}" if high < 1 << 62 else f"uncached ≥ {low}"
        cohorts[name] = (uncached >= low) & (uncached < high)
    found = [_errors(name, requests, rows) for name, rows in cohorts.items()]
    return [errors for errors in found if errors is not None]


def _errors(name: str, requests: Requests, rows: BoolArray) -> Errors | None:
    known = rows & ~requests.censored
    if known.sum() < _LEAST_CELL:
        return None
    seen, predicted = requests.seen_ms[known], requests.predicted_ms[known]
    relative = predicted / seen - 1.0
    median_abs, bias = round(float(np.median(np.abs(relative))), 4), round(float(np.median(relative)), 4)
    return Errors(name, int(known.sum()), median_abs, bias)


def baseline_errors(requests: Requests) -> dict[str, Baseline]:
    """Errors in sample of a line in uncached tokens with the least squared relative errors."""
    known = ~requests.censored
    seen, uncached = requests.seen_ms[known], requests.uncached_tokens[known]
    design = np.stack([np.ones(len(seen)), uncached], axis=1)
    line = np.linalg.lstsq(design / seen[:, None], np.ones(len(seen)), rcond=None)[0]
    intercept_ms, per_token_ms = float(line[0]), float(line[1])
    relative = np.abs(intercept_ms + per_token_ms * uncached - seen) / seen
    baseline = Baseline(
        formula=f"{intercept_ms:.4g} ms + {per_token_ms:.4g} ms/token",
        intercept_ms=intercept_ms,
        per_uncached_token_ms=per_token_ms,
        median_abs_error=round(float(np.median(relative)), 4),
        p90_abs_error=round(quantile(np.sort(relative), 0.9), 4),
    )
    return {"linear_in_uncached_tokens": baseline}
