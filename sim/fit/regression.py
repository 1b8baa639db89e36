"""Non-negative robust regression of prefill and decode intervals on their work, and the noise of the residuals.

Residuals are relative: intervals of 1 s and of 10 ms are predicted to the same percentage, by which forecasts are
evaluated, and long prefills keep their weight. Prefill and decode intervals have their own robust scale and half of the
weight each; pooled, thousands of decodes would outweigh the prefills.
"""

from dataclasses import dataclass, replace

import numpy as np

from measure.distributions import ndtri
from sim.fit.observations import Observations
from sim.fit.priors import NO_ASSUMPTIONS, Priors
from sim.latency.noise import LEVELS, Noise
from sim.latency.stepcost import KV_TOKENS, NUM_STEP_TERMS, REPEATED_KV_TOKENS
from tracefile.records.arrays import BoolArray, FloatArray, IntArray
from tracefile.records.extras import load_extra

HUBER = 2.5
"""Robust standard deviations beyond which residuals count linearly. Wide, because misfits of steps are signal."""
_ROUNDS = 20
_SMALL = 1e-6
_RIDGE = 1e-10
_TIE = 1e-6
"""Weight of the prior on repeated KV reads, relative to first reads: decisive only for captures without repeats."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Parameters and the regression weights of prefill and decode intervals."""

    parameters: FloatArray
    """In the order of ``TERMS``; 0 for terms outside the fit; shape (terms,)."""
    weights: FloatArray
    prefill_scale: float
    """Robust standard deviation of the relative residuals of intervals with prefill."""
    decode_scale: float
    condition: float
    """Condition number of the weighted, column-scaled normal equations: over 1e8, terms are not separable."""


def solve(observed: Observations, free: list[int], assumed: Priors = NO_ASSUMPTIONS) -> Solution:
    """Solve terms ``free`` by iteratively reweighted least squares; first weights are relative to measured times."""
    parameters: FloatArray = np.zeros(observed.counts.shape[1])
    more, of_it = assumed.equations(free, num_sessions(observed))
    weights, scales = robust_weights(observed, observed.measured_ms, observed.measured_ms)
    for _ in range(_ROUNDS):
        gram, moment = normal_equations(observed.counts[:, free], observed.measured_ms, weights)
        gram, moment = gram + more, moment + of_it
        tie_repeated_reads(gram, free)
        estimate = np.zeros_like(parameters)
        estimate[free] = solve_normal(gram, moment)
        change = np.abs((estimate - parameters) * observed.counts.max(axis=0, initial=0.0)).max(initial=0.0)
        parameters = estimate
        weights, scales = robust_weights(observed, observed.counts @ parameters, np.abs(observed.counts) @ parameters)
        if change < _SMALL * observed.measured_ms.max(initial=0.0):
            break
    return Solution(parameters, weights, scales[0], scales[1], condition_number(gram))


def robust_weights(
    observed: Observations, predicted_ms: FloatArray, sizes_ms: FloatArray
) -> tuple[FloatArray, tuple[float, float]]:
    """Return Huber weights of squared residuals relative to ``sizes_ms``, and the prefill and decode scales."""
    size = np.maximum(sizes_ms, 0.1 * observed.measured_ms)  # bounds the weight where the prediction is near 0
    relative = (observed.measured_ms - predicted_ms) / size
    weights = np.zeros(len(relative))
    scales = []
    for group in (observed.is_prefill, ~observed.is_prefill):
        spread = 1.4826 * float(np.median(np.abs(relative[group]))) if group.any() else 0.0
        spread = max(spread, 1e-6)
        huber = np.minimum(1.0, HUBER * spread / np.maximum(np.abs(relative[group]), 1e-300))
        weights[group] = huber / (spread * size[group]) ** 2 / max(int(group.sum()), 1)
        scales.append(spread)
    return weights, (scales[0], scales[1])


def normal_equations(counts: FloatArray, measured_ms: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return ``counts``ᵀ W ``counts`` and ``counts``ᵀ W ``measured_ms``; shapes (k, k) and (k,)."""
    weighted = counts * weights[:, None]
    return counts.T @ weighted, weighted.T @ measured_ms


def tie_repeated_reads(gram: FloatArray, free: list[int]) -> None:
    """Add a prior that a repeated KV cache read costs as much as a first read, for captures without repeats."""
    if not {KV_TOKENS, REPEATED_KV_TOKENS} <= set(free):
        return
    first, again = free.index(KV_TOKENS), free.index(REPEATED_KV_TOKENS)
    weight = _TIE * gram[first, first]
    for row, column, sign in ((first, first, 1), (again, again, 1), (first, again, -1), (again, first, -1)):
        gram[row, column] += sign * weight


def solve_normal(gram: FloatArray, moment: FloatArray) -> FloatArray:
    """Return the non-negative least-squares solution of normal equations; shape (k,). Empty columns get 0."""
    # Half of the import time of a fit.
    linalg, nnls = load_extra("scipy.linalg"), load_extra("scipy.optimize").nnls

    scale = np.sqrt(np.diag(gram))
    live = scale > 0.0
    solution = np.zeros(len(moment))
    if not live.any():
        return solution
    unit = scale[live]
    scaled = gram[np.ix_(live, live)] / np.outer(unit, unit) + _RIDGE * np.eye(int(live.sum()))
    upper = linalg.cholesky(scaled)
    target = linalg.solve_triangular(upper, moment[live] / unit, trans="T")
    solution[live] = nnls(upper, target)[0] / unit
    return solution


def condition_number(gram: FloatArray) -> float:
    """Return the condition number of the column-scaled matrix; infinite if a column is empty, 1 without any."""
    if not len(gram):
        return 1.0
    scale = np.sqrt(np.diag(gram))
    if not (scale > 0.0).all():
        return float("inf")
    return float(np.linalg.cond(gram / np.outer(scale, scale)))


def num_sessions(observed: Observations) -> int:
    return int(observed.session.max(initial=-1)) + 1


def bootstrap(
    observed: Observations,
    weights: FloatArray,
    free: list[int],
    rounds: int,
    seed: int,
    *,
    assumed: Priors = NO_ASSUMPTIONS,
) -> FloatArray:
    """Return parameters from resampled sessions; shape (rounds, terms). Token counts and weights are fixed.

    Priors are drawn with their spread.
    """
    sessions, counts = num_sessions(observed), observed.counts[:, free]
    grams, moments = np.zeros((sessions, len(free), len(free))), np.zeros((sessions, len(free)))
    order = np.argsort(observed.session, kind="stable")
    bounds = np.searchsorted(observed.session[order], np.arange(sessions + 1))
    for session in range(sessions):
        rows = order[bounds[session] : bounds[session + 1]]
        grams[session], moments[session] = normal_equations(counts[rows], observed.measured_ms[rows], weights[rows])
    random = np.random.default_rng(seed)
    draws = random.multinomial(sessions, np.full(sessions, 1.0 / sessions), size=rounds)
    scores = random.standard_normal((rounds, len(assumed.rows)))
    estimates = np.zeros((rounds, observed.counts.shape[1]))
    for row, times in enumerate(draws):
        more, of_it = assumed.equations(free, sessions, scores[row])
        gram, moment = np.tensordot(times, grams, axes=1) + more, times @ moments + of_it
        tie_repeated_reads(gram, free)
        estimates[row, free] = solve_normal(gram, moment)
    return estimates


_PER_KNOT = 25
LEAST_OPENINGS = 20
_SMALL_FRONT = 0.1
"""Largest API server share of an interval that measures steps."""
LARGE_FRONT = 1.0 / 3.0
"""Smallest share of an interval that measures the API server."""
_FAR = 0.5
"""A prefill shorter than predicted by more than this share is a late read, or in another step than reconstructed."""
_SAME_MS = 1e-6
_LAGS = (1, 2, 3, 5, 8, 13, 21, 34, 55)
_CORRELATIONS_MS = np.geomspace(20.0, 60_000.0, 33)
_MAX_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class _Steps:
    """Intervals that measure scheduler steps, ordered by capture and time."""

    start_ms: FloatArray
    capture: IntArray
    step_ms: FloatArray
    """Predicted, of one step; of several, their mean."""
    log_ratio: FloatArray
    """log(seen / predicted), without the API server's part."""
    steps: IntArray
    bin: IntArray


def estimate_noise(observed: Observations, parameters: FloatArray) -> Noise:
    """Return quantiles of log(measured / predicted) by step latency, autocorrelation, and API server quantiles."""
    observed = with_late_reads_joined(observed, observed.counts @ parameters)
    predicted_ms = observed.counts @ parameters
    front_ms = observed.counts[:, NUM_STEP_TERMS:] @ parameters[NUM_STEP_TERMS:]
    is_step = (front_ms < _SMALL_FRONT * predicted_ms) & (observed.measured_ms > front_ms)
    is_step &= ~observed.is_prefill | (observed.measured_ms > _FAR * predicted_ms)
    if is_step.sum() < _PER_KNOT:
        return Noise()
    selected = observed.select(is_step)
    steps_ms = predicted_ms[is_step] - front_ms[is_step]
    edges_ms = _edges(steps_ms / selected.steps)
    samples = _Steps(
        selected.start_ms,
        selected.capture,
        steps_ms / selected.steps,
        np.log((selected.measured_ms - front_ms[is_step]) / steps_ms),
        selected.steps,
        np.searchsorted(edges_ms, steps_ms / selected.steps, side="right"),
    )
    share, correlation_time_ms = _autocorrelation(samples)
    rows = [
        _quantiles(_single_logs(samples, samples.bin == number, share, correlation_time_ms))
        for number in range(len(edges_ms) + 1)
    ]
    knots = [round(float(np.median(samples.step_ms[samples.bin == number])), 4) for number in range(len(rows))]
    return Noise(
        step_ms=tuple(knots),
        step_log_ratio=tuple(rows),
        autocorrelated_share=round(share, 4),
        correlation_time_ms=round(correlation_time_ms, 1),
        frontend_log_ratio=_front_quantiles(observed, predicted_ms, front_ms, samples),
    )


def with_late_reads_joined(observed: Observations, predicted_ms: FloatArray) -> Observations:
    """Join a far too short prefill with the far too long interval before it: its tokens were read late."""
    missing_ms = predicted_ms - observed.measured_ms
    follows = (observed.capture[1:] == observed.capture[:-1]) & ~observed.opens[1:]
    follows &= np.abs(observed.start_ms[1:] - (observed.start_ms + observed.measured_ms)[:-1]) < _SAME_MS
    far = observed.is_prefill[1:] & (missing_ms[1:] > _FAR * predicted_ms[1:])
    joined = np.zeros(len(missing_ms), dtype=np.bool_)
    joined[1:] = follows & far & (-missing_ms[:-1] > _FAR * missing_ms[1:])
    firsts = np.flatnonzero(~joined)
    return replace(
        observed.select(~joined),
        measured_ms=np.add.reduceat(observed.measured_ms, firsts),
        counts=np.add.reduceat(observed.counts, firsts, axis=0),
        is_prefill=np.logical_or.reduceat(observed.is_prefill, firsts),
        steps=np.add.reduceat(observed.steps, firsts),
    )


def _edges(step_ms: FloatArray) -> FloatArray:
    """Return edges of step latency bins: a factor of two wide, wider where samples are few."""
    least, most = float(np.log2(step_ms.min())), float(np.log2(step_ms.max()))
    ladder = np.exp2(np.arange(np.floor(least) + 1, np.ceil(most)))
    edges: list[float] = []
    for edge_ms in ladder.tolist():
        below = (step_ms < edge_ms) & (step_ms >= (edges[-1] if edges else 0.0))
        if below.sum() >= _PER_KNOT and (step_ms >= edge_ms).sum() >= _PER_KNOT:
            edges.append(edge_ms)
    return np.array(edges)


def _quantiles(log_ratio: FloatArray) -> tuple[float, ...]:
    return tuple(round(float(value), 6) for value in np.quantile(log_ratio, LEVELS))


def _single_logs(samples: _Steps, rows: BoolArray, share: float, correlation_time_ms: float) -> FloatArray:
    """Return log(measured / predicted) of single scheduler steps; means of several are spread as single steps."""
    log_ratio, steps, step_ms = samples.log_ratio[rows], samples.steps[rows], samples.step_ms[rows]
    several = steps > 1
    if several.any():
        middle = float(np.median(log_ratio[several]))
        narrow = np.array(
            [
                _deviation_of_mean(*group, share, correlation_time_ms)
                for group in zip(steps[several], step_ms[several], strict=True)
            ]
        )
        log_ratio[several] = middle + (log_ratio[several] - middle) / narrow
    return log_ratio


def _deviation_of_mean(steps: int, step_ms: float, share: float, correlation_time_ms: float) -> float:
    """Return the standard deviation of the mean noise of ``steps`` steps, relative to one step."""
    apart = np.arange(1, steps)
    together = share * np.exp(-apart * step_ms / correlation_time_ms)
    return float(np.sqrt((1.0 + 2.0 * np.sum((1.0 - apart / steps) * together)) / steps))


def _autocorrelation(samples: _Steps) -> tuple[float, float]:
    """Fit share · exp(−time / duration) to products of normal scores some scheduler steps apart, by least squares."""
    single = samples.steps == 1
    scores = np.zeros(len(single))
    for number in range(int(samples.bin.max(initial=0)) + 1):
        rows = single & (samples.bin == number)
        _, index, ties = np.unique(samples.log_ratio[rows], return_inverse=True, return_counts=True)
        rank = (np.cumsum(ties) - (ties - 1) / 2)[index]
        scores[rows] = ndtri((rank - 0.5) / max(int(rows.sum()), 1))
    scores, start_ms, capture = scores[single], samples.start_ms[single], samples.capture[single]
    products, apart_ms = [], []
    for lag in _LAGS:
        same = capture[lag:] == capture[:-lag]
        products.append((scores[lag:] * scores[:-lag])[same])
        apart_ms.append((start_ms[lag:] - start_ms[:-lag])[same])
    product, apart = np.concatenate(products), np.concatenate(apart_ms)
    if len(product) < _PER_KNOT:
        return 0.0, 1.0
    total = float(product @ product)
    best = (total, 0.0, 1.0)
    for correlation_time_ms in _CORRELATIONS_MS.tolist():
        decay = np.exp(-apart / correlation_time_ms)
        together, alone = float(product @ decay), float(decay @ decay)
        share = float(np.clip(together / max(alone, 1e-12), 0.0, _MAX_SHARE))
        best = min(best, (total - share * (2 * together - share * alone), share, correlation_time_ms))
    return best[1], best[2]


def _front_quantiles(
    observed: Observations, predicted_ms: FloatArray, front_ms: FloatArray, samples: _Steps
) -> tuple[float, ...]:
    """Return quantiles of log(measured / predicted) API server latency, of short prompts at an idle engine."""
    rows = observed.opens & (front_ms >= LARGE_FRONT * predicted_ms)
    if rows.sum() < LEAST_OPENINGS:
        return Noise().frontend_log_ratio
    steps_ms = predicted_ms[rows] - front_ms[rows]
    near = samples.log_ratio[(samples.bin == 0) & (samples.steps == 1)]
    middle, spread = (float(np.median(near)), _spread(near)) if len(near) else (0.0, 0.0)
    left_ms = observed.measured_ms[rows] - steps_ms * np.exp(middle)
    variance = _spread(left_ms) ** 2
    wider = float(np.sqrt(np.clip(1.0 - np.mean((steps_ms * spread) ** 2) / max(variance, 1e-12), 0.0, 1.0)))
    log_ratio = np.log(np.maximum(left_ms / front_ms[rows], 0.05))
    centre = float(np.median(log_ratio))
    return _quantiles(centre + wider * (log_ratio - centre))


def _spread(values: FloatArray) -> float:
    low, high = np.quantile(values, [0.1587, 0.8413])
    return float(high - low) / 2.0
