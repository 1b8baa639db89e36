"""Noise of steps, as in ``sim.latency.noise``: drawn by counter, read off tables."""

import math

import numpy as np

from sim.kernels.compiling import kernel
from sim.kernels.layout import Draws, SimState
from sim.latency.noise import NORMALS, at, step_log
from tracefile.hashing.splitmix64 import GOLDEN, mix64

_NORMALS = float(NORMALS)
_GOLDEN = np.uint64(GOLDEN)
_at = kernel(at)
_step_log = kernel(step_log)
_mix64 = kernel(mix64)


@kernel
def step_factor(state: SimState, start_ms: float, step_ms: float) -> float:
    """Factor of the next step, which begins at ``start_ms`` and is predicted to take ``step_ms``."""
    draws, clock = state.draws, state.clock[0]
    if len(draws.step_table) == 0:
        return 1.0
    normal = 0.0
    if len(draws.step_key):
        counter = np.uint64(2) * np.uint64(clock.steps_drawn)
        own = _at(draws.normals, _uniform(draws, counter) * _NORMALS)
        fresh = _at(draws.normals, _uniform(draws, counter + np.uint64(1)) * _NORMALS)
        kept = math.exp(-(start_ms - clock.slow_at_ms) / draws.weights[2])
        clock.slow = kept * clock.slow + math.sqrt(1.0 - kept * kept) * fresh
        clock.slow_at_ms = start_ms
        clock.steps_drawn += 1
        normal = draws.weights[0] * clock.slow + draws.weights[1] * own
    return math.exp(_step_log(draws.step_knots, draws.step_table, normal, step_ms))


@kernel
def _uniform(draws: Draws, counter: np.uint64) -> float:
    drawn = _mix64(draws.step_key[0] + (counter + np.uint64(1)) * _GOLDEN)
    return float(np.float64(np.int64(drawn >> np.uint64(11))) * 2.0**-53)
