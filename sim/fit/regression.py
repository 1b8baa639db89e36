"""Non-negative robust regression of intervals, with and without prefill, on their makeup; the noise that it leaves.

Residuals are relative: an interval of a second and one of ten milliseconds are both predicted to so many per cent,
which is what forecasts are judged by, and long prefills keep their say. Each group has its own robust scale and half of
the weight; pooled, thousands of decodes would outvote the prefills.
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
"""Residuals beyond so many robust standard deviations count linearly. Wide, because a step's misfit is a signal."""
_ROUNDS = 20
_SMALL = 1e-6
_RIDGE = 1e-10
_TIE = 1e-6
"""Weight of the assumption on repeated KV reads, as a share of what the captures tell of first ones: it decides where
next to none was seen."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Parameters and the weights that they were found with."""

    parameters: FloatArray
    """In the order of ``TERMS``; 0 for terms that were not asked for; shape (terms,)."""
    weights: FloatArray
    prefill_scale: float
    """Robust standard deviation of the relative residuals of intervals with prefill."""
    decode_scale: float
    condition: float
    """Condition number of the weighted, column-scaled normal equations: over 1e8, terms cannot be told apart."""


def solve(seen: Observations, free: list[int], assumed: Priors = NO_ASSUMPTIONS) -> Solution:
    """Iteratively reweighted least squares over the terms ``free``; weights are relative to the seen times at first."""
    parameters: FloatArray = np.zeros(seen.counts.shape[1])
    more, of_it = assumed.equations(free, num_sessions(seen))
    weights, scales = robust_weights(seen, seen.seen_ms, seen.seen_ms)
    for _ in range(_ROUNDS):
        gram, moment = normal_equations(seen.counts[:, free], seen.seen_ms, weights)
        gram, moment = gram + more, moment + of_it
        tie_repeated_reads(gram, free)
        found = np.zeros_like(parameters)
        found[free] = solve_normal(gram, moment)
        change = np.abs((found - parameters) * seen.counts.max(axis=0, initial=0.0)).max(initial=0.0)
        parameters = found
        weights, scales = robust_weights(seen, seen.counts @ parameters, np.abs(seen.counts) @ parameters)
        if change < _SMALL * seen.seen_ms.max(initial=0.0):
            break
    return Solution(parameters, weights, scales[0], scales[1], condition_number(gram))


def robust_weights(
    seen: Observations, predicted_ms: FloatArray, sizes_ms: FloatArray
) -> tuple[FloatArray, tuple[float, float]]:
    """Huber weights of squared absolute residuals (relative to ``sizes_ms``), and the two groups' scales."""
    size = np.maximum(sizes_ms, 0.1 * seen.seen_ms)  # what predicts nothing must not weigh without bound
    relative = (seen.seen_ms - predicted_ms) / size
    weights = np.zeros(len(relative))
    scales = []
    for group in (seen.is_prefill, ~seen.is_prefill):
        spread = 1.4826 * float(np.median(np.abs(relative[group]))) if group.any() else 0.0
        spread = max(spread, 1e-6)
        huber = np.minimum(1.0, HUBER * spread / np.maximum(np.abs(relative[group]), 1e-300))
        weights[group] = huber / (spread * size[group]) ** 2 / max(int(group.sum()), 1)
        scales.append(spread)
    return weights, (scales[0], scales[1])


def normal_equations(counts: FloatArray, seen_ms: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
    """``counts``ᵀ W ``counts`` and ``counts``ᵀ W ``seen_ms``; shapes (k, k) and (k,)."""
    weighted = counts * weights[:, None]
    return counts.T @ weighted, weighted.T @ seen_ms


def tie_repeated_reads(gram: FloatArray, free: list[int]) -> None:
    """Add the assumption that a repeated KV read costs as much as a first one, so that it does where none was seen."""
    if not {KV_TOKENS, REPEATED_KV_TOKENS} <= set(free):
        return
    first, again = free.index(KV_TOKENS), free.index(REPEATED_KV_TOKENS)
    weight = _TIE * gram[first, first]
    for one, other, sign in ((first, first, 1), (again, again, 1), (first, again, -1), (again, first, -1)):
        gram[one, other] += sign * weight


def solve_normal(gram: FloatArray, moment: FloatArray) -> FloatArray:
    """The non-negative least-squares solution from its normal equations; shape (k,). Empty columns get 0."""
    # Half of what a fit imports, and all of it by modules that only name one.
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


def num_sessions(seen: Observations) -> int:
    return int(seen.session.max(initial=-1)) + 1


def bootstrap(
    seen: Observations,
    weights: FloatArray,
    free: list[int],
    rounds: int,
    seed: int,
    *,
    assumed: Priors = NO_ASSUMPTIONS,
) -> FloatArray:
    """Parameters from resampled sessions; shape (rounds, terms). Counts and weights of the observations stay.

    Defaults are drawn with their spread.
    """
    sessions, counts = num_sessions(seen), seen.counts[:, free]
    grams, moments = np.zeros((sessions, len(free), len(free))), np.zeros((sessions, len(free)))
    order = np.argsort(seen.session, kind="stable")
    bounds = np.searchsorted(seen.session[order], np.arange(sessions + 1))
    for session in range(sessions):
        rows = order[bounds[session] : bounds[session + 1]]
        grams[session], moments[session] = normal_equations(counts[rows], seen.seen_ms[rows], weights[rows])
    random = np.random.default_rng(seed)
    draws = random.multinomial(sessions, np.full(sessions, 1.0 / sessions), size=rounds)
    scores = random.standard_normal((rounds, len(assumed.rows)))
    found = np.zeros((rounds, seen.counts.shape[1]))
    for row, times in enumerate(draws):
        more, of_it = assumed.equations(free, sessions, scores[row])
        gram, moment = np.tensordot(times, grams, axes=1) + more, times @ moments + of_it
        tie_repeated_reads(gram, free)
        found[row, free] = solve_normal(gram, moment)
    return found


_PER_KNOT = 25
LEAST_OPENINGS = 20
_SMALL_FRONT = 0.1
"""Intervals with less of the API server's time than this tell of steps."""
LARGE_FRONT = 1.0 / 3.0
"""Those with more tell of the API server."""
_FAR = 0.5
"""A prefill that lacks more than this share of its time was not that quick: its tokens, or those of the step before,
were read late, or its request was in another step than the reads say."""
_SAME_MS = 1e-6
_LAGS = (1, 2, 3, 5, 8, 13, 21, 34, 55)
_CORRELATIONS_MS = np.geomspace(20.0, 60_000.0, 33)
_MAX_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class _Steps:
    """Intervals that tell of steps, in order of captures and time."""

    start_ms: FloatArray
    capture: IntArray
    step_ms: FloatArray
    """Predicted, of one step; of several, their mean."""
    log_ratio: FloatArray
    """log(seen / predicted), without the API server's part."""
    steps: IntArray
    bin: IntArray


def estimate_noise(seen: Observations, parameters: FloatArray) -> Noise:
    """Estimate quantiles of log(seen / predicted) by step length, their autocorrelation, the API server's quantiles."""
    seen = with_late_reads_joined(seen, seen.counts @ parameters)
    predicted_ms = seen.counts @ parameters
    front_ms = seen.counts[:, NUM_STEP_TERMS:] @ parameters[NUM_STEP_TERMS:]
    told = (front_ms < _SMALL_FRONT * predicted_ms) & (seen.seen_ms > front_ms)
    told &= ~seen.is_prefill | (seen.seen_ms > _FAR * predicted_ms)
    if told.sum() < _PER_KNOT:
        return Noise()
    own = seen.select(told)
    steps_ms = predicted_ms[told] - front_ms[told]
    edges_ms = _edges(steps_ms / own.steps)
    found = _Steps(
        own.start_ms,
        own.capture,
        steps_ms / own.steps,
        np.log((own.seen_ms - front_ms[told]) / steps_ms),
        own.steps,
        np.searchsorted(edges_ms, steps_ms / own.steps, side="right"),
    )
    share, correlation_time_ms = _autocorrelation(found)
    rows = [
        _quantiles(_single_logs(found, found.bin == number, share, correlation_time_ms))
        for number in range(len(edges_ms) + 1)
    ]
    knots = [round(float(np.median(found.step_ms[found.bin == number])), 4) for number in range(len(rows))]
    return Noise(
        step_ms=tuple(knots),
        step_log_ratio=tuple(rows),
        autocorrelated_share=round(share, 4),
        correlation_time_ms=round(correlation_time_ms, 1),
        frontend_log_ratio=_front_quantiles(seen, predicted_ms, front_ms, found),
    )


def with_late_reads_joined(seen: Observations, predicted_ms: FloatArray) -> Observations:
    """Join prefills that are far too short to the interval before, if that is as much too long: tokens read late."""
    lacking_ms = predicted_ms - seen.seen_ms
    follows = (seen.capture[1:] == seen.capture[:-1]) & ~seen.opens[1:]
    follows &= np.abs(seen.start_ms[1:] - (seen.start_ms + seen.seen_ms)[:-1]) < _SAME_MS
    far = seen.is_prefill[1:] & (lacking_ms[1:] > _FAR * predicted_ms[1:])
    joined = np.zeros(len(lacking_ms), dtype=np.bool_)
    joined[1:] = follows & far & (-lacking_ms[:-1] > _FAR * lacking_ms[1:])
    firsts = np.flatnonzero(~joined)
    return replace(
        seen.select(~joined),
        seen_ms=np.add.reduceat(seen.seen_ms, firsts),
        counts=np.add.reduceat(seen.counts, firsts, axis=0),
        is_prefill=np.logical_or.reduceat(seen.is_prefill, firsts),
        steps=np.add.reduceat(seen.steps, firsts),
    )


def _edges(step_ms: FloatArray) -> FloatArray:
    """Between bins that are a factor of two wide, or as much wider as it takes to hold enough."""
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


def _single_logs(found: _Steps, rows: BoolArray, share: float, correlation_time_ms: float) -> FloatArray:
    """log(seen / predicted) of single steps: of those that were seen together, as wide as theirs must have been."""
    log_ratio, steps, step_ms = found.log_ratio[rows], found.steps[rows], found.step_ms[rows]
    several = steps > 1
    if several.any():
        middle = float(np.median(log_ratio[several]))
        narrow = np.array(
            [
                _deviation_of_mean(*each, share, correlation_time_ms)
                for each in zip(steps[several], step_ms[several], strict=True)
            ]
        )
        log_ratio[several] = middle + (log_ratio[several] - middle) / narrow
    return log_ratio


def _deviation_of_mean(steps: int, step_ms: float, share: float, correlation_time_ms: float) -> float:
    """Standard deviation of the mean noise of ``steps`` in a row, beside that of one."""
    apart = np.arange(1, steps)
    together = share * np.exp(-apart * step_ms / correlation_time_ms)
    return float(np.sqrt((1.0 + 2.0 * np.sum((1.0 - apart / steps) * together)) / steps))


def _autocorrelation(found: _Steps) -> tuple[float, float]:
    """Fit share · exp(−time between / duration) to products of normal scores some steps apart, by least squares."""
    single = found.steps == 1
    scores = np.zeros(len(single))
    for number in range(int(found.bin.max(initial=0)) + 1):
        rows = single & (found.bin == number)
        _, place, ties = np.unique(found.log_ratio[rows], return_inverse=True, return_counts=True)
        rank = (np.cumsum(ties) - (ties - 1) / 2)[place]
        scores[rows] = ndtri((rank - 0.5) / max(int(rows.sum()), 1))
    scores, start_ms, capture = scores[single], found.start_ms[single], found.capture[single]
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
    seen: Observations, predicted_ms: FloatArray, front_ms: FloatArray, found: _Steps
) -> tuple[float, ...]:
    """Quantiles of log(seen / predicted) of the API server's time, from short prompts at an idle engine, less noise."""
    rows = seen.opens & (front_ms >= LARGE_FRONT * predicted_ms)
    if rows.sum() < LEAST_OPENINGS:
        return Noise().frontend_log_ratio
    steps_ms = predicted_ms[rows] - front_ms[rows]
    near = found.log_ratio[(found.bin == 0) & (found.steps == 1)]
    middle, spread = (float(np.median(near)), _spread(near)) if len(near) else (0.0, 0.0)
    left_ms = seen.seen_ms[rows] - steps_ms * np.exp(middle)
    variance = _spread(left_ms) ** 2
    wider = float(np.sqrt(np.clip(1.0 - np.mean((steps_ms * spread) ** 2) / max(variance, 1e-12), 0.0, 1.0)))
    log_ratio = np.log(np.maximum(left_ms / front_ms[rows], 0.05))
    centre = float(np.median(log_ratio))
    return _quantiles(centre + wider * (log_ratio - centre))


def _spread(values: FloatArray) -> float:
    low, high = np.quantile(values, [0.1587, 0.8413])
    return float(high - low) / 2.0
