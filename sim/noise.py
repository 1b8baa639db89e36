"""What the step model does not explain, as the fit found it: quantiles of observed / predicted, drawn by counter.

A draw depends on the seed, the request's id and the token's place, and on nothing else: not on the order of the
simulation, not on how many other requests there are. So one seed gives one file, and a what-if that changes one
request leaves the luck of all others as it was.

TTFT's quantiles are tabled by prefill size (uncached prompt tokens), between whose knots they are interpolated in
log(1 + tokens). Their median is the calibration: where the model is off on the fit's own captures for prefills of
that size, predictions are moved by as much. ITLs of one request are correlated, and with its TTFT: a slow moment of
the machine is slow for both. The correlations are those of a Gaussian copula (of the ranks, that is).
"""

import math
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from scipy.special import ndtr, ndtri

from tracefile.errors import InputError

Floats = npt.NDArray[np.float64]

LEVELS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
"""Probabilities at which quantiles are kept. Beyond the outermost the noise is flat: no tail is made up."""

_TTFT, _REQUEST, _FIRST_TOKEN = 0, 1, 16
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of log(observed / predicted). Raises InputError if its tables do not fit together."""

    levels: tuple[float, ...] = LEVELS
    """Probabilities, ascending: the columns of the tables."""
    ttft_tokens: tuple[float, ...] = (0.0,)
    """Uncached prompt tokens, ascending: the rows of ``ttft_log_ratio``."""
    ttft_log_ratio: tuple[tuple[float, ...], ...] = ((0.0,) * len(LEVELS),)
    """Per row and level: log(observed TTFT / predicted TTFT)."""
    itl_log_ratio: tuple[float, ...] = (0.0,) * len(LEVELS)
    """Per level: log(observed gap / predicted gap)."""
    itl_request_correlation: float = 0.0
    """Correlation of two gaps of one request, 0 to 1."""
    ttft_itl_correlation: float = 0.0
    """Correlation of a request's TTFT with what its gaps share, −1 to 1."""

    def __post_init__(self) -> None:
        width = len(self.levels)
        if not all(len(row) == width for row in (*self.ttft_log_ratio, self.itl_log_ratio)):
            raise InputError(f"noise: a table's row has another length than the {width} levels")
        if len(self.ttft_log_ratio) != len(self.ttft_tokens) or not self.ttft_tokens:
            raise InputError("noise: ttft_log_ratio needs a row for each of ttft_tokens")
        if any(b <= a for a, b in pairwise(self.levels)) or any(b <= a for a, b in pairwise(self.ttft_tokens)):
            raise InputError("noise: levels and ttft_tokens must ascend")

    def ttft_factors(self, uncached_tokens: Floats, u: Floats) -> Floats:
        """Observed / predicted TTFT at probabilities ``u`` for prefills of ``uncached_tokens``; shapes (n,)."""
        knots = np.log1p(np.asarray(self.ttft_tokens))
        place = np.log1p(uncached_tokens)
        table = np.asarray(self.ttft_log_ratio)
        at_knots = np.stack([np.interp(u, self.levels, row) for row in table])
        upper = np.clip(np.searchsorted(knots, place, side="right"), 1, max(len(knots) - 1, 1))
        if len(knots) == 1:
            return np.asarray(np.exp(at_knots[0]))
        share = np.clip((place - knots[upper - 1]) / (knots[upper] - knots[upper - 1]), 0.0, 1.0)
        column = np.arange(len(place))
        low, high = at_knots[upper - 1, column], at_knots[upper, column]
        return np.asarray(np.exp(low + share * (high - low)))

    def itl_factors(self, u: Floats) -> Floats:
        """Observed / predicted gap at probabilities ``u``; shape (n,)."""
        return np.asarray(np.exp(np.interp(u, self.levels, self.itl_log_ratio)))


class RequestNoise:
    """The draws of one request: a factor for its TTFT, one for each gap. ``seed`` None: medians, no draws."""

    __slots__ = ("_key", "_noise", "_ttft_z")

    def __init__(self, noise: Noise, seed: int | None, request_id: str) -> None:
        self._noise = noise
        self._key = None if seed is None else np.uint64(_request_key(seed, request_id))
        self._ttft_z = 0.0 if self._key is None else float(_normals(self._key, _TTFT, 1)[0])

    def ttft_factor(self, uncached_tokens: int) -> float:
        """What to multiply the predicted TTFT with."""
        u = np.array([0.5 if self._key is None else ndtr(self._ttft_z)])
        return float(self._noise.ttft_factors(np.array([float(uncached_tokens)]), u)[0])

    def itl_factors(self, count: int) -> Floats:
        """What to multiply the first ``count`` predicted gaps with; shape (count,)."""
        if self._key is None:
            return self._noise.itl_factors(np.full(count, 0.5))
        with_ttft = self._noise.ttft_itl_correlation
        own = float(_normals(self._key, _REQUEST, 1)[0])
        shared = with_ttft * self._ttft_z + math.sqrt(1.0 - with_ttft * with_ttft) * own
        within = self._noise.itl_request_correlation
        z = math.sqrt(within) * shared + math.sqrt(1.0 - within) * _normals(self._key, _FIRST_TOKEN, count)
        return self._noise.itl_factors(np.asarray(ndtr(z)))


def _request_key(seed: int, request_id: str) -> int:
    return xxhash.xxh3_64_intdigest(request_id.encode(), seed=seed & 0xFFFFFFFFFFFFFFFF)


def _normals(key: np.uint64, first: int, count: int) -> Floats:
    """Standard normals number ``first`` and on of the stream ``key``: splitmix64 of the counter."""
    counters = np.arange(first, first + count, dtype=np.uint64)
    mixed = key + (counters + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(ndtri(uniform))
