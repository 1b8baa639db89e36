"""Times of a capture's steps over the model's, by kinds of steps: no forecast is in them, only the captured schedule.

The pace of a whole capture is ``sim.fit.pace``'s. A kind that is off beside its pace is a term's error, not the host's.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from sim.fit.observations import Observations
from sim.fit.pace import capture_steps
from sim.latency.modelfile import Model
from sim.latency.terms import DECODES
from tracefile import load_trace
from tracefile.records.arrays import BoolArray

ANSWERS = {"1–3": (1.0, 3.0), "4–15": (4.0, 15.0), "16+": (16.0, np.inf)}
"""So many at once, both ends included."""
PREFILLS = ("alone, after a rest", "alone, at once", "beside decodes")
LEAST_STEPS = 20


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Captured over predicted time of a capture's steps, the middle of each kind; only kinds of ``LEAST_STEPS``."""

    decodes: dict[str, float]
    """Steps without prefill, by the outputs in them: ``16+``."""
    prefills: dict[str, float]
    """Steps with prefill, as ``PREFILLS`` has them: the engine rested before, or not; outputs were generated too."""


def step_times(trace: Path, model: Model) -> StepTimes:
    """Return the step times of a capture over the model's."""
    meta, records = load_trace(trace)
    seen = capture_steps(meta, records, model, str(trace))
    answers = seen.counts[:, DECODES] / seen.steps
    decodes = {name: ~seen.is_prefill & (answers >= low) & (answers <= high) for name, (low, high) in ANSWERS.items()}
    beside = seen.counts[:, DECODES] > 0.0
    kinds = (~beside & seen.opens, ~beside & ~seen.opens, beside)
    prefills = {name: seen.is_prefill & kind for name, kind in zip(PREFILLS, kinds, strict=True)}
    return StepTimes(decodes=_middles(seen, model, decodes), prefills=_middles(seen, model, prefills))


def _middles(seen: Observations, model: Model, kinds: Mapping[str, BoolArray]) -> dict[str, float]:
    ratio = seen.seen_ms / np.maximum(seen.counts @ np.array(model.costs), 1e-6)
    return {name: round(float(np.median(ratio[rows])), 3) for name, rows in kinds.items() if rows.sum() >= LEAST_STEPS}
