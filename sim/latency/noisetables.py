"""Noise as arrays of numbers: tables of steps' factors, and the factors of requests."""

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np

from sim.latency.noise import NORMALS, PER_NORMAL, WIDEST, Noise, stream, uniform
from tracefile.records.arrays import FloatArray


def step_knots(noise: Noise) -> FloatArray:
    return np.asarray(np.log(np.asarray(noise.step_ms)))


def step_table(noise: Noise) -> FloatArray:
    """log(observed / predicted) per knot at normals from −``WIDEST`` to ``WIDEST``; no rows: every factor is 1."""
    if not any(any(row) for row in noise.step_log_ratio):
        return np.empty((0, 0))
    at = np.arange(-WIDEST * PER_NORMAL, WIDEST * PER_NORMAL + 1) / PER_NORMAL
    normal = NormalDist()
    u = [normal.cdf(z) for z in at.tolist()]
    return np.stack([np.interp(u, noise.levels, row) for row in noise.step_log_ratio])


def frontend_factors(noise: Noise, seed: int | None, request_ids: Sequence[str]) -> FloatArray:
    """Factors on the API server's time per request, shape (n,); ``seed`` None: the median."""
    if seed is None or not any(noise.frontend_log_ratio):
        return np.full(len(request_ids), _frontend_factor(noise, 0.5))
    return np.array([_frontend_factor(noise, uniform(stream(seed, name.encode()), 0)) for name in request_ids])


def _frontend_factor(noise: Noise, u: float) -> float:
    return math.exp(float(np.interp(u, noise.levels, noise.frontend_log_ratio)))


@cache
def normals_table() -> FloatArray:
    """Standard normals at probabilities 0 to 1 in ``NORMALS`` steps, the outermost at a quarter of a step."""
    least, normal = 0.25 / NORMALS, NormalDist()
    return np.array([normal.inv_cdf(min(max(i / NORMALS, least), 1.0 - least)) for i in range(NORMALS + 1)])
