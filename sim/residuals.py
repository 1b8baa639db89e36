"""What a fit leaves over: the noise of the model, the errors it is honest about, and where it is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import CensoredData, ecdf, norm, rankdata

from sim.fixedpoint import Capture
from sim.noise import LEVELS, Noise
from sim.observations import Bools, Ints, Observations
from sim.timeline import Floats

_PER_KNOT = 25
_MOST_KNOTS = 6
_LEAST_CELL = 5


@dataclass(frozen=True, slots=True)
class Requests:
    """The TTFTs of a fit, with what may explain an error; all of shape (n,)."""

    request: Ints
    """Numbered over all captures."""
    seen_ms: Floats
    predicted_ms: Floats
    censored: Bools
    prompt_tokens: Floats
    cached_tokens: Floats
    concurrency: Floats

    @property
    def uncached_tokens(self) -> Floats:
        """Prompt tokens that had to be computed."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def log_ratio(self) -> Floats:
        """log(seen / predicted)."""
        return np.asarray(np.log(np.maximum(self.seen_ms, 1e-6) / np.maximum(self.predicted_ms, 1e-6)))


def requests_of(captures: Sequence[Capture], seen: Observations, parameters: Floats) -> Requests:
    """One row per TTFT, seen or censored."""
    ttft = seen.select(seen.is_ttft)
    records = [record for capture in captures for record in capture.records]
    cached = np.array([tokens for capture in captures for tokens in capture.cached_tokens], dtype=np.float64)
    return Requests(
        ttft.request,
        ttft.seen_ms,
        ttft.counts @ parameters,
        ttft.censored,
        np.array([float(records[place].prompt_tokens or 0) for place in ttft.request]),
        cached[ttft.request],
        np.array([float(records[place].concurrency or 1) for place in ttft.request]),
    )


def estimate_noise(requests: Requests, seen: Observations, parameters: Floats) -> Noise:
    """Quantiles of log(seen / predicted): TTFT's per prefill size by Kaplan–Meier, the gaps' all together."""
    knots, members = _prefill_bins(requests)
    table = tuple(_survival_quantiles(requests.log_ratio[rows], requests.censored[rows]) for rows in members)
    gaps = seen.select(~seen.is_ttft)
    ratio = np.log(np.maximum(gaps.seen_ms, 1e-6) / np.maximum(gaps.counts @ parameters, 1e-6))
    within, with_ttft = _correlations(requests, members, gaps, ratio)
    return Noise(
        ttft_tokens=tuple(knots),
        ttft_log_ratio=table,
        itl_log_ratio=tuple(round(float(value), 6) for value in np.quantile(ratio, LEVELS)),
        itl_request_correlation=within,
        ttft_itl_correlation=with_ttft,
    )


def _prefill_bins(requests: Requests) -> tuple[list[float], list[Ints]]:
    """Bins of equal count along the uncached tokens: each one's middle, and its rows; equal sizes stay together."""
    tokens = requests.uncached_tokens
    count = int(np.clip((~requests.censored).sum() // _PER_KNOT, 1, _MOST_KNOTS))
    edges = np.unique(np.quantile(tokens, np.linspace(0.0, 1.0, count + 1)[1:-1]))
    bins = np.searchsorted(edges, tokens, side="left")
    members = [
        rows for number in range(len(edges) + 1) if (~requests.censored[rows := np.flatnonzero(bins == number)]).any()
    ]
    knots = [round(float(np.expm1(np.log1p(tokens[rows]).mean())), 1) for rows in members]
    return knots, members


def _survival_quantiles(log_ratio: Floats, censored: Bools) -> tuple[float, ...]:
    """Kaplan–Meier quantiles at ``LEVELS``; those past the last event are the last event's."""
    data = CensoredData(uncensored=log_ratio[~censored], right=log_ratio[censored])
    curve = ecdf(data).cdf
    place = np.searchsorted(curve.probabilities, LEVELS, side="left")
    values = curve.quantiles[np.minimum(place, len(curve.quantiles) - 1)]
    if not censored.any():
        values = np.quantile(log_ratio, LEVELS)
    return tuple(round(float(value), 6) for value in values)


def _correlations(
    requests: Requests, members: Sequence[Ints], gaps: Observations, ratio: Floats
) -> tuple[float, float]:
    """Of the normal scores: two gaps of one request, and a request's TTFT with what its gaps share."""
    z = _normal_scores(ratio)
    number = int(max(gaps.request.max(initial=-1), requests.request.max(initial=-1))) + 1
    counts = np.bincount(gaps.request, minlength=number)
    several = counts >= 2
    if several.sum() < _LEAST_CELL:
        return 0.0, 0.0
    means = np.bincount(gaps.request, weights=z, minlength=number) / np.maximum(counts, 1)
    kept = several[gaps.request]
    inside = float(((z - means[gaps.request])[kept] ** 2).sum() / (counts[several] - 1).sum())
    size = float(1.0 / np.mean(1.0 / counts[several]))
    between = max(float(np.var(means[several], ddof=1)) - inside / size, 0.0)
    within = between / (between + inside) if between + inside > 0.0 else 0.0
    scores = np.full(number, np.nan)
    for rows in members:
        scores[requests.request[rows]] = _normal_scores(requests.log_ratio[rows])
    both = several & ~np.isnan(scores)
    if within < 0.02 or both.sum() < _LEAST_CELL:
        return round(within, 4), 0.0
    reliability = between / (between + inside / size)
    plain = float(np.corrcoef(scores[both], means[both])[0, 1])
    return round(min(within, 0.98), 4), round(float(np.clip(plain / np.sqrt(reliability), -0.95, 0.95)), 4)


def _normal_scores(values: Floats) -> Floats:
    return np.asarray(norm.ppf((rankdata(values) - 0.5) / max(len(values), 1)))


@dataclass(frozen=True, slots=True)
class Errors:
    """In-sample errors of a cohort's TTFT, before calibration, as fractions; negative: predicted too early."""

    cohort: str
    requests: int
    p50: float
    p90: float
    p99: float
    median_abs: float
    """Median over requests of |predicted − seen| / seen."""
    bias: float
    """Median over requests of (predicted − seen) / seen."""


def cohort_errors(requests: Requests) -> list[Errors]:
    """All requests, cold ones (nothing cached), warm ones, and four sizes of prefill."""
    uncached, cached = requests.uncached_tokens, requests.cached_tokens
    cohorts = {"all": np.ones(len(cached), dtype=np.bool_), "cold": cached == 0, "warm": cached > 0}
    for low, high in ((0, 256), (256, 1024), (1024, 4096), (4096, 1 << 62)):
        name = f"uncached {low}–{high - 1}" if high < 1 << 62 else f"uncached ≥ {low}"
        cohorts[name] = (uncached >= low) & (uncached < high)
    found = [_errors(name, requests, rows & ~requests.censored) for name, rows in cohorts.items()]
    return [errors for errors in found if errors is not None]


def _errors(name: str, requests: Requests, rows: Bools) -> Errors | None:
    if rows.sum() < _LEAST_CELL:
        return None
    seen, predicted = requests.seen_ms[rows], requests.predicted_ms[rows]
    p50, p90, p99 = (
        round(float(np.quantile(predicted, level) / np.quantile(seen, level) - 1.0), 4) for level in (0.5, 0.9, 0.99)
    )
    relative = predicted / seen - 1.0
    median_abs, bias = round(float(np.median(np.abs(relative))), 4), round(float(np.median(relative)), 4)
    return Errors(name, int(rows.sum()), p50, p90, p99, median_abs, bias)


@dataclass(frozen=True, slots=True)
class Misfit:
    """The TTFT error in one bin of one explanation."""

    axis: str
    low: float
    high: float
    requests: int
    bias: float
    """Median of (predicted − seen) / seen."""
    bias_ms: float
    """Median of predicted − seen, ms."""
    median_abs: float


def locate_misfit(requests: Requests, bins: int = 5) -> list[Misfit]:
    """Errors along prompt length, uncached tokens, depth (cached tokens) and concurrency, in bins of equal count."""
    axes = {
        "prompt tokens": requests.prompt_tokens,
        "uncached tokens": requests.uncached_tokens,
        "depth (cached)": requests.cached_tokens,
        "concurrency": requests.concurrency,
    }
    known = ~requests.censored
    found = []
    for axis, values in axes.items():
        edges = np.unique(np.quantile(values[known], np.linspace(0.0, 1.0, bins + 1)))
        places = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, max(len(edges) - 2, 0))
        for number in range(max(len(edges) - 1, 1)):
            rows = known & (places == number)
            if rows.any():
                difference = requests.predicted_ms[rows] - requests.seen_ms[rows]
                relative = difference / requests.seen_ms[rows]
                found.append(
                    Misfit(
                        axis,
                        float(values[rows].min()),
                        float(values[rows].max()),
                        int(rows.sum()),
                        float(np.median(relative)),
                        float(np.median(difference)),
                        float(np.median(np.abs(relative))),
                    )
                )
    return found
