"""What the step model does not explain, as the fit found it: quantiles of observed / predicted, drawn by counter.

A draw depends on the seed, the request's id and the token's place, and on nothing else: not on the order of the
simulation, not on how many other requests there are. So one seed gives one file, and a what-if that changes one
request leaves the luck of all others as it was.

TTFT's quantiles are tabled by prefill size (uncached prompt tokens), between whose knots they are interpolated in
log(1 + tokens). Their median is the calibration: where the model is off on the fit's own captures for prefills of
that size, predictions are moved by as much. ITLs of one request are correlated, and with its TTFT: a slow moment of
the machine is slow for both. The correlations are those of a Gaussian copula (of the ranks, that is).

Gaps are many, so their normals and factors are read off tables, between whose entries they are interpolated: additions
and multiplications only, which are the same to the bit in NumPy and compiled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import NormalDist

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tracefile.errors import InputError

Floats = npt.NDArray[np.float64]

LEVELS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
"""Probabilities at which quantiles are kept. Beyond the outermost the noise is flat: no tail is made up."""

NORMALS = 1 << 12
"""Intervals of the table of normals, which ends at probabilities of a quarter of one."""
WIDEST, PER_NORMAL = 5, 128
"""The table of gaps' factors goes from minus to plus so many standard deviations, with so many intervals to each."""
FIRST_TOKEN = 16
"""Place in a request's stream of the draw for its first gap."""
_TTFT, _REQUEST = 0, 1
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

    def gap_table(self) -> Floats:
        """Observed / predicted gap at normals from −``WIDEST`` to ``WIDEST``."""
        at = np.arange(-WIDEST * PER_NORMAL, WIDEST * PER_NORMAL + 1) / PER_NORMAL
        return self.itl_factors(np.array([_NORMAL.cdf(z) for z in at.tolist()]))

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

    __slots__ = ("_key", "_noise", "_ttft_u")

    def __init__(self, noise: Noise, seed: int | None, request_id: str) -> None:
        self._noise = noise
        self._key = None if seed is None else np.array([_request_key(seed, request_id)], np.uint64)
        self._ttft_u = np.array([0.5]) if self._key is None else _uniforms(self._key, _TTFT)

    def ttft_factor(self, uncached_tokens: int) -> float:
        """What to multiply the predicted TTFT with."""
        return ttft_factor(self._noise.ttft_knots(), self._noise.ttft_logs(self._ttft_u)[0], uncached_tokens)

    def itl_factors(self, count: int) -> Floats:
        """What to multiply the first ``count`` predicted gaps with; shape (count,)."""
        if self._key is None:
            return self._noise.itl_factors(np.full(count, 0.5))
        shared, own_weight = _shared_part(self._noise, self._key, self._ttft_u), _own_weight(self._noise)
        counters = np.arange(FIRST_TOKEN, FIRST_TOKEN + count, dtype=np.uint64)
        own = interpolate(_normals_table(), _uniforms(self._key, counters) * NORMALS)
        table = self._noise.gap_table()
        return interpolate(table, np.clip((shared + own_weight * own + WIDEST) * PER_NORMAL, 0.0, len(table) - 1.001))


@dataclass(frozen=True, slots=True)
class RunNoise:
    """What the draws of all requests of a run are made of; number for number those of ``RequestNoise``."""

    ttft_knots: Floats
    ttft_logs: Floats
    """Shape (requests, knots)."""
    keys: npt.NDArray[np.uint64]
    """Of each request's stream; none if all gaps have the same factor."""
    shared: Floats
    """What the gaps of each request have in common."""
    own_weight: float
    """Of what each gap has alone."""
    normals: Floats
    gap_factors: Floats
    """The tables that gaps are read off; a single factor: that of all."""


def draw_run(noise: Noise, seed: int | None, request_ids: Sequence[str]) -> RunNoise:
    """Draw what each request has one of."""
    knots, nothing = noise.ttft_knots(), np.empty(0)
    if seed is None:
        logs, constant = noise.ttft_logs(np.full(len(request_ids), 0.5)), True
        keys = np.empty(0, np.uint64)
    else:
        keys = np.array([_request_key(seed, request_id) for request_id in request_ids], np.uint64)
        ttft_u = _uniforms(keys, _TTFT)
        logs, constant = noise.ttft_logs(ttft_u), len(set(noise.itl_log_ratio)) == 1
    if constant:
        return RunNoise(knots, logs, keys[:0], nothing, 0.0, nothing, noise.itl_factors(np.array([0.5])))
    shared = _shared_part(noise, keys, ttft_u)
    return RunNoise(knots, logs, keys, shared, _own_weight(noise), _normals_table(), noise.gap_table())


def interpolate(table: Floats, places: Floats) -> Floats:
    """``table`` at ``places`` from 0 to below its last entry's, linearly between entries."""
    below = places.astype(np.int64)
    low = table[below]
    return np.asarray(low + (places - below) * (table[below + 1] - low))


def _shared_part(noise: Noise, keys: npt.NDArray[np.uint64], ttft_u: Floats) -> Floats:
    """What the gaps of each request have in common, in part with its TTFT."""
    with_ttft, table = noise.ttft_itl_correlation, _normals_table()
    own = interpolate(table, _uniforms(keys, _REQUEST) * NORMALS)
    z = with_ttft * interpolate(table, ttft_u * NORMALS) + math.sqrt(1.0 - with_ttft * with_ttft) * own
    return np.asarray(math.sqrt(noise.itl_request_correlation) * z)


def _own_weight(noise: Noise) -> float:
    return math.sqrt(1.0 - noise.itl_request_correlation)


def _request_key(seed: int, request_id: str) -> int:
    return xxhash.xxh3_64_intdigest(request_id.encode(), seed=seed & 0xFFFFFFFFFFFFFFFF)


def _uniforms(keys: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64] | int) -> Floats:
    """Numbers between 0 and 1 of streams ``keys`` at places ``counters``: splitmix64 of the counter."""
    mixed = keys + (np.atleast_1d(np.asarray(counters, np.uint64)) + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return np.asarray((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)


_NORMAL = NormalDist()


@cache
def _normals_table() -> Floats:
    """Standard normals at probabilities 0 to 1 in ``NORMALS`` steps, the outermost at a quarter of a step."""
    least = 0.25 / NORMALS
    return np.array([_NORMAL.inv_cdf(min(max(i / NORMALS, least), 1.0 - least)) for i in range(NORMALS + 1)])
