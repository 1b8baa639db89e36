"""Noise of the latency model: random factors on scheduler steps and on API server work, from a counter-based stream.

The duration of a step is its predicted duration times a factor. The distribution of the factor depends on the predicted
duration: a delay of a few milliseconds is large for a step of 12 ms and small for a step of 400 ms. All requests of a
step share its factor, so TTFT and ITL are drawn jointly, and queueing needs no noise of its own. A share of the
factor is autocorrelated: its correlation with the value t ms before is exp(−t / ``correlation_time_ms``). Each request
has a factor on the API server's work.

A draw depends only on the seed and on the step's number, or on the request's id. Normals and logs are interpolated in
tables (``sim.latency.stepnoise``).
"""

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise
from statistics import NormalDist

import msgspec
import numpy as np
import xxhash

from sim.latency.stepnoise import NORMALS, PER_NORMAL, WIDEST
from tracefile.hashing.splitmix64 import GOLDEN, MASK64, mix64_array
from tracefile.records.arrays import FloatArray
from tracefile.records.errors import InputError

LEVELS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
"""Probabilities of the stored quantiles. Beyond the outermost the quantile is constant: no tail is assumed."""

WIDEST_LOG = 50.0
"""Largest absolute log ratio: a factor of 5e21, far from overflow."""
_STEPS = b"\0steps"
"""Name of the random stream of steps; the stream of a request is named by its id."""


class Noise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Distributions of log(observed / predicted) latency. Raises InputError if the tables are inconsistent."""

    levels: tuple[float, ...] = LEVELS
    """Probabilities, ascending: the columns of the tables."""
    step_ms: tuple[float, ...] = (1.0,)
    """Predicted durations of a step, ascending, ms: the rows of ``step_log_ratio``, interpolated in their log."""
    step_log_ratio: tuple[tuple[float, ...], ...] = ((0.0,) * len(LEVELS),)
    """Per row and level: log(observed duration of a step / predicted)."""
    autocorrelated_share: float = 0.0
    """Share of the variance of a step's factor that is autocorrelated, 0 to 1."""
    correlation_time_ms: float = 1.0
    """Time in which the autocorrelation falls to 1/e, ms."""
    frontend_log_ratio: tuple[float, ...] = (0.0,) * len(LEVELS)
    """Per level: log(observed time in the API server / predicted)."""

    def __post_init__(self) -> None:
        width = len(self.levels)
        if not all(len(row) == width for row in (*self.step_log_ratio, self.frontend_log_ratio)):
            raise InputError(f"noise: a table's row has another length than the {width} levels")
        if len(self.step_log_ratio) != len(self.step_ms) or not self.step_ms:
            raise InputError("noise: step_log_ratio needs a row for each of step_ms")
        if any(b <= a for a, b in pairwise(self.levels)) or any(b <= a for a, b in pairwise(self.step_ms)):
            raise InputError("noise: levels and step_ms must ascend")
        if not self.step_ms[0] > 0.0:
            raise InputError(f"noise: step_ms: {self.step_ms[0]}; expected more than 0")
        for name, ratios in (
            ("step_log_ratio", (value for row in self.step_log_ratio for value in row)),
            ("frontend_log_ratio", self.frontend_log_ratio),
        ):
            odd = next((value for value in ratios if not -WIDEST_LOG <= value <= WIDEST_LOG), None)
            if odd is not None:
                raise InputError(f"noise: {name}: {odd}; expected a log ratio from {-WIDEST_LOG:g} to {WIDEST_LOG:g}")
        if not (0.0 <= self.autocorrelated_share <= 1.0 and self.correlation_time_ms > 0.0):
            raise InputError(
                f"noise: autocorrelated_share {self.autocorrelated_share}, correlation_time_ms "
                f"{self.correlation_time_ms}; expected 0 to 1, and more than 0"
            )


def weights(noise: Noise) -> tuple[float, float]:
    """Return the weights of the autocorrelated and of the independent normal of a step's factor."""
    return math.sqrt(noise.autocorrelated_share), math.sqrt(1.0 - noise.autocorrelated_share)


def stream(seed: int, name: bytes) -> int:
    """Return the key of the random stream of a name under a seed."""
    return xxhash.xxh3_64_intdigest(name, seed=seed & MASK64)


def steps_stream(seed: int) -> int:
    return stream(seed, _STEPS)


def step_knots(noise: Noise) -> FloatArray:
    return np.asarray(np.log(np.asarray(noise.step_ms)))


def step_table(noise: Noise) -> FloatArray:
    """Return log(observed / predicted) by knot, at normals from −``WIDEST`` to ``WIDEST``; empty: no noise."""
    if not any(any(row) for row in noise.step_log_ratio):
        return np.empty((0, 0))
    at = np.arange(-WIDEST * PER_NORMAL, WIDEST * PER_NORMAL + 1) / PER_NORMAL
    normal = NormalDist()
    probabilities = [normal.cdf(z) for z in at.tolist()]
    return np.stack([np.interp(probabilities, noise.levels, row) for row in noise.step_log_ratio])


def frontend_factors(noise: Noise, seed: int | None, request_ids: Sequence[str]) -> FloatArray:
    """Return the noise factor on the API server's time of each request, shape (n,); ``seed`` None: the median."""
    if seed is None or not any(noise.frontend_log_ratio):
        return np.full(len(request_ids), math.exp(np.interp(0.5, noise.levels, noise.frontend_log_ratio)))
    return _random_factors(noise, seed, tuple(request_ids))


@lru_cache(maxsize=128)  # members keep their noise from scenario to scenario
def _random_factors(noise: Noise, seed: int, request_ids: tuple[str, ...]) -> FloatArray:
    keys = np.array([stream(seed, name.encode()) for name in request_ids], np.uint64)
    uniforms = (mix64_array(keys + np.uint64(GOLDEN)) >> 11) * 2.0**-53
    logs = np.interp(uniforms, noise.levels, noise.frontend_log_ratio)
    return np.array([math.exp(log) for log in logs.tolist()])  # numpy's has other last bits


@cache
def normals_table() -> FloatArray:
    """Return standard normals at probabilities 0 to 1 in ``NORMALS`` intervals, the outermost at a quarter interval."""
    least, normal = 0.25 / NORMALS, NormalDist()
    return np.array([normal.inv_cdf(min(max(i / NORMALS, least), 1.0 - least)) for i in range(int(NORMALS) + 1)])
