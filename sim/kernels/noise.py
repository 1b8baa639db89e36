"""Gaps' noise, as in ``sim.noise``: drawn by counter, read off tables."""

import numpy as np

from sim.kernels.compiling import kernel
from sim.kernels.layout import Draws, Floats
from sim.noise import FIRST_TOKEN, NORMALS, PER_NORMAL, WIDEST

_FIRST, _NORMALS, _WIDEST, _PER_NORMAL = np.uint64(FIRST_TOKEN), float(NORMALS), float(WIDEST), float(PER_NORMAL)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@kernel
def gap_factor(draws: Draws, place: int, number: int) -> float:
    """Observed / predicted of a request's gap ``number``, from 0 on."""
    if len(draws.keys) == 0:
        return float(draws.gap_factors[0])
    mixed = draws.keys[place] + (_FIRST + np.uint64(number) + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    own = _at(draws.normals, np.float64(np.int64(mixed >> np.uint64(11))) * 2.0**-53 * _NORMALS)
    at = (draws.shared[place] + draws.own_weight[0] * own + _WIDEST) * _PER_NORMAL
    return _at(draws.gap_factors, min(max(at, 0.0), len(draws.gap_factors) - 1.001))


@kernel
def _at(table: Floats, place: float) -> float:
    below = np.int64(place)
    low = table[below]
    return float(low + (place - below) * (table[below + 1] - low))
