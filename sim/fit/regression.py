"""Non-negative robust regression of two groups of intervals, with and without prefill, on their makeup.

Residuals are relative: an interval of a second and one of ten milliseconds are both predicted to so many per cent,
which is what forecasts are judged by, and long prefills keep their say. Each group has its own robust scale and half of
the weight; pooled, thousands of decodes would outvote the prefills.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import nnls

from sim.fit.observations import Observations
from tracefile.records.arrays import FloatArray

HUBER = 2.5
"""Residuals beyond so many robust standard deviations count linearly. Wide, because a step's misfit is a signal."""
_ROUNDS = 20
_SMALL = 1e-6
_RIDGE = 1e-10


@dataclass(frozen=True, slots=True)
class Solution:
    """Parameters and the weights that they were found with."""

    parameters: FloatArray
    """In the order of ``TERMS``; 0 for terms that were not asked for; shape (terms,)."""
    weights: FloatArray
    """Of each squared absolute residual; shape (n,)."""
    prefill_scale: float
    """Robust standard deviation of the relative residuals of intervals with prefill."""
    decode_scale: float
    condition: float
    """Condition number of the weighted, column-scaled normal equations: over 1e8, terms cannot be told apart."""


def solve(seen: Observations, free: list[int]) -> Solution:
    """Iteratively reweighted least squares over the terms ``free``; all weigh the same at first, relative to what was
    seen."""
    parameters = np.zeros(seen.counts.shape[1])
    weights, scales = robust_weights(seen, seen.seen_ms, seen.seen_ms)
    for _ in range(_ROUNDS):
        gram, moment = normal_equations(seen.counts[:, free], seen.seen_ms, weights)
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
    """Huber weights of squared absolute residuals, and the two groups' scales. ``sizes_ms``: what residuals are
    relative to, ``predicted_ms`` without what the delivery of the token before takes off it."""
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


def solve_normal(gram: FloatArray, moment: FloatArray) -> FloatArray:
    """The non-negative least-squares solution from its normal equations; shape (k,). Empty columns get 0."""
    scale = np.sqrt(np.diag(gram))
    live = scale > 0.0
    solution = np.zeros(len(moment))
    if not live.any():
        return solution
    unit = scale[live]
    scaled = gram[np.ix_(live, live)] / np.outer(unit, unit) + _RIDGE * np.eye(int(live.sum()))
    upper = cholesky(scaled)
    target = solve_triangular(upper, moment[live] / unit, trans="T")
    solution[live] = nnls(upper, target)[0] / unit
    return solution


def condition_number(gram: FloatArray) -> float:
    """Return the condition number of the column-scaled matrix; infinite if a column is empty."""
    scale = np.sqrt(np.diag(gram))
    if not (scale > 0.0).all():
        return float("inf")
    return float(np.linalg.cond(gram / np.outer(scale, scale)))


def bootstrap(seen: Observations, weights: FloatArray, free: list[int], rounds: int, seed: int) -> FloatArray:
    """Parameters from resampled sessions; shape (rounds, terms).

    Intervals keep their terms and weights. An interval thus holds the captures' sampling error, not that of the
    schedule or of a model of the wrong shape.
    """
    sessions = int(seen.session.max(initial=-1)) + 1
    counts = seen.counts[:, free]
    grams = np.zeros((sessions, len(free), len(free)))
    moments = np.zeros((sessions, len(free)))
    order = np.argsort(seen.session, kind="stable")
    bounds = np.searchsorted(seen.session[order], np.arange(sessions + 1))
    for session in range(sessions):
        rows = order[bounds[session] : bounds[session + 1]]
        grams[session], moments[session] = normal_equations(counts[rows], seen.seen_ms[rows], weights[rows])
    draws = np.random.default_rng(seed).multinomial(sessions, np.full(sessions, 1.0 / sessions), size=rounds)
    found = np.zeros((rounds, seen.counts.shape[1]))
    for row, times in enumerate(draws):
        gram = np.tensordot(times, grams, axes=1)
        found[row, free] = solve_normal(gram, times @ moments)
    return found
