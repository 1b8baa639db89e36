"""Pace of the engine during a capture, without any forecast: its own step times over the model's.

Each step of the captured schedule is counted as a fit would count it, and held against what the model gives it. Queues,
sessions and noise are not in this: it tells an engine that was slower or quicker than when it was calibrated from a
forecast that is wrong about what the engine had to do.
"""

from pathlib import Path

import msgspec
import numpy as np

from sim.fit.drift import speed
from sim.fit.observations import Observations
from sim.fit.pace import capture_steps
from sim.latency.modelfile import Model
from sim.latency.terms import DECODES
from tracefile import load_trace
from tracefile.records.arrays import FloatArray

ANSWERS = {"1–3": (1.0, 3.0), "4–15": (4.0, 15.0), "16+": (16.0, np.inf)}
"""So many at once, both ends included."""
LEAST_STEPS = 20


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Captured over predicted time of one capture's steps, the middle of it."""

    steps: float
    """Of those with prefill and of those without, half each."""
    decodes: dict[str, float]
    """Of those without, by how many answers are in them: ``16+``; only where there are enough."""


def pace(trace: Path, model: Model) -> Pace:
    """Return the step times of a capture."""
    meta, records = load_trace(trace)
    parameters = np.array(model.costs)
    seen = capture_steps(meta, records, model, str(trace))
    ratio = seen.seen_ms / np.maximum(seen.counts @ parameters, 1e-6)
    return Pace(steps=round(float(np.exp(speed(seen, parameters))), 3), decodes=_by_answers(seen, ratio))


def _by_answers(seen: Observations, ratio: FloatArray) -> dict[str, float]:
    answers = seen.counts[:, DECODES] / seen.steps
    found = {}
    for name, (low, high) in ANSWERS.items():
        rows = ~seen.is_prefill & (answers >= low) & (answers <= high)
        if rows.sum() >= LEAST_STEPS:
            found[name] = round(float(np.median(ratio[rows])), 3)
    return found
