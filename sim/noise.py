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
from collections.abc import Sequence
from dataclasses import dataclass
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
_TOKENS_AT_ONCE = 1 << 18
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
        knots, logs = self.ttft_knots(), self.ttft_logs(u)
        return np.array([ttft_factor(knots, *pair) for pair in zip(logs, uncached_tokens, strict=True)])

    def ttft_knots(self) -> Floats:
        """log(1 + uncached tokens) of the table's rows."""
        return np.asarray(np.log1p(np.asarray(self.ttft_tokens)))

    def ttft_logs(self, u: Floats) -> Floats:
        """log(observed / predicted TTFT) at probabilities ``u`` and the knots; shape (n, knots)."""
        return np.stack([np.interp(u, self.levels, row) for row in self.ttft_log_ratio], axis=1)

    def itl_factors(self, u: Floats) -> Floats:
        """Observed / predicted gap at probabilities ``u``; shape (n,)."""
        return np.asarray(np.exp(np.interp(u, self.levels, self.itl_log_ratio)))


def ttft_factor(knots: Floats, logs: Floats, uncached_tokens: float) -> float:
    """Observed / predicted TTFT of a prefill, whose ``logs`` at the ``knots`` are drawn. Compiled too, so plain."""
    if len(knots) == 1:
        return math.exp(logs[0])
    place = math.log1p(uncached_tokens)
    upper = 1
    while upper < len(knots) - 1 and knots[upper] <= place:
        upper += 1
    share = (place - knots[upper - 1]) / (knots[upper] - knots[upper - 1])
    share = min(max(share, 0.0), 1.0)
    return math.exp(logs[upper - 1] + share * (logs[upper] - logs[upper - 1]))


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
        return ttft_factor(self._noise.ttft_knots(), self._noise.ttft_logs(u)[0], uncached_tokens)

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


@dataclass(frozen=True, slots=True)
class RunNoise:
    """The draws of all requests of a run, made at once; number for number those of ``RequestNoise``."""

    ttft_knots: Floats
    ttft_logs: Floats
    """Shape (requests, knots)."""
    itl_factors: Floats
    """Request by request, one for each token: that of the gap before it (a first token's is never used). A single one
    if all are the same."""


def draw_run(noise: Noise, seed: int | None, request_ids: Sequence[str], num_tokens: npt.NDArray[np.int64]) -> RunNoise:
    """Draw for requests of at most ``num_tokens`` tokens each."""
    knots = noise.ttft_knots()
    if seed is None:
        medians = noise.ttft_logs(np.full(len(request_ids), 0.5))
        return RunNoise(knots, medians, noise.itl_factors(np.array([0.5])))
    keys = np.array([_request_key(seed, request_id) for request_id in request_ids], np.uint64)
    ttft_z = _normals_at(keys, np.array([_TTFT], np.uint64))
    logs = noise.ttft_logs(np.asarray(ndtr(ttft_z)))
    if len(set(noise.itl_log_ratio)) == 1:
        return RunNoise(knots, logs, noise.itl_factors(np.array([0.5])))
    with_ttft = noise.ttft_itl_correlation
    own = _normals_at(keys, np.array([_REQUEST], np.uint64))
    shared = with_ttft * ttft_z + math.sqrt(1.0 - with_ttft * with_ttft) * own
    factors = np.empty(int(num_tokens.sum()))
    ends = np.cumsum(num_tokens)
    first = 0
    while first < len(keys):
        # So many requests at once that what stands between one array and the next stays small.
        begin = int(ends[first] - num_tokens[first])
        last = max(int(np.searchsorted(ends, begin + _TOKENS_AT_ONCE)), first + 1)
        batch = slice(first, last)
        factors[begin : ends[last - 1]] = _gap_factors(noise, keys[batch], shared[batch], num_tokens[batch])
        first = last
    return RunNoise(knots, logs, factors)


def _gap_factors(
    noise: Noise, keys: npt.NDArray[np.uint64], shared: Floats, num_tokens: npt.NDArray[np.int64]
) -> Floats:
    starts = np.cumsum(num_tokens) - num_tokens
    token = np.arange(int(num_tokens.sum())) - np.repeat(starts, num_tokens)
    counters = (token + (_FIRST_TOKEN - 1)).astype(np.uint64)
    own = _normals_at(np.repeat(keys, num_tokens), counters)
    within = noise.itl_request_correlation
    z = math.sqrt(within) * np.repeat(shared, num_tokens) + math.sqrt(1.0 - within) * own
    return noise.itl_factors(np.asarray(ndtr(z)))


def _request_key(seed: int, request_id: str) -> int:
    return xxhash.xxh3_64_intdigest(request_id.encode(), seed=seed & 0xFFFFFFFFFFFFFFFF)


def _normals(key: np.uint64, first: int, count: int) -> Floats:
    """Standard normals number ``first`` and on of the stream ``key``."""
    return _normals_at(key, np.arange(first, first + count, dtype=np.uint64))


def _normals_at(keys: npt.NDArray[np.uint64] | np.uint64, counters: npt.NDArray[np.uint64]) -> Floats:
    """Standard normals of streams ``keys`` at places ``counters``: splitmix64 of the counter."""
    mixed = keys + (counters + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(ndtri(uniform))
