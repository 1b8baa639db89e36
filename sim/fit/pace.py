"""Pace of an engine: how long the steps of a capture took over what a model gives them. Any traffic tells it.

Neither queues, sessions nor noise are in it, only steps that the capture's schedule names.
"""

from dataclasses import asdict, dataclass
from math import exp, hypot, log, sqrt
from pathlib import Path

import msgspec
import numpy as np

from measure.distributions import ndtri, stdtrit
from sim.fit.drift import INTERVAL, Drift, drift_of_mean, speed, widened
from sim.fit.observations import Observations, observe
from sim.fit.regression import with_late_reads_joined
from sim.fit.variants import Capture, prepare_capture, schedule_of
from sim.latency.fittraces import fit_trace
from sim.latency.modelfile import Model, Parameter
from sim.workload.arrivals import plan_arrivals
from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record

FEWEST_INTERVALS = 100
MOST_BLOCKS = 8
"""Parts of a capture, in order of time, whose spread tells how well its pace is known, and how long it lasts."""
_PER_BLOCK = FEWEST_INTERVALS // 2


@dataclass(frozen=True, slots=True)
class Pace:
    """Time of a capture's steps over a model's, and how well it is known."""

    factor: float
    log_sd: float
    """Standard deviation of log(factor) of another part of such traffic, soon after."""
    freedom: int
    """Its degrees of freedom."""
    intervals: int

    @property
    def reach(self) -> float:
        """Error of log(``factor``) at the ends of a 95 % interval."""
        return drift_of_mean(Drift(self.log_sd, self.freedom), self.freedom + 1)


def capture_steps(meta: Meta, records: list[Record], model: Model, path: str) -> Observations:
    """Return the intervals of a capture, whose work ``model.costs`` prices."""
    hashed = any(record.block_hashes is not None for record in records)
    arrivals = plan_arrivals(meta, records, model.engine.block_size, path=path, cold_prompts=not hashed)
    return priced_steps(prepare_capture(records, arrivals, model.engine, path), model)


def priced_steps(capture: Capture, model: Model) -> Observations:
    schedule = schedule_of(capture, model.engine)
    seen = observe(capture.records, schedule, model.frontend_placement, model.costs)
    return with_late_reads_joined(seen, seen.counts @ np.array(model.costs))


def measure_pace(seen: Observations, model: Model, path: str) -> Pace:
    """Return the pace of ``capture_steps``. Raises InputError if they are too few."""
    intervals = len(seen.seen_ms)
    if intervals < FEWEST_INTERVALS:
        raise InputError(
            f"{path}: {intervals} intervals between tokens; expected {FEWEST_INTERVALS} for a pace, of streamed outputs"
        )
    costs = np.array(model.costs)
    blocks = np.array_split(np.arange(intervals), min(MOST_BLOCKS, intervals // _PER_BLOCK))
    spread = float(np.std([speed(seen, costs, block) for block in blocks], ddof=1))
    return Pace(
        factor=float(np.exp(speed(seen, costs))),
        log_sd=spread * sqrt(1 + 1 / len(blocks)),
        freedom=len(blocks) - 1,
        intervals=intervals,
    )


def with_pace(model: Model, pace: Pace) -> Model:
    """Return the model at another pace: every cost times the factor; drift is what the pace leaves unknown."""
    return msgspec.structs.replace(
        model,
        parameters={name: _paced(one, pace) for name, one in model.parameters.items()},
        draws=[[value * pace.factor for value in draw] for draw in model.draws],
        drift_log_sd=round(pace.log_sd, 6),
        drift_freedom=pace.freedom,
    )


def _paced(parameter: Parameter, pace: Pace) -> Parameter:
    value, low, high = parameter.value * pace.factor, parameter.low, parameter.high
    if low is not None and high is not None:
        low, high = widened(value, low * pace.factor, high * pace.factor, pace.reach)
    return msgspec.structs.replace(parameter, value=value, low=low, high=high)


def paced_model(model: Model, path: Path) -> Model:
    """Return ``model`` at the pace of the capture in ``path``, which may then not judge it. Raises InputError."""
    meta, records = load_trace(path)
    pace = measure_pace(capture_steps(meta, records, model, str(path)), model, str(path))
    return msgspec.structs.replace(
        with_pace(model, pace),
        fitted_on=[*model.fitted_on, fit_trace(path, trace_digest(path), records)],
        diagnostics={**model.diagnostics, "pace": {**asdict(pace), "said": describe_pace(pace, path.name, model)}},
    )


LEAST_DRIFT = log(1.05)
"""Drift that is never reported: forecasts' bands are wider."""


def describe_pace(pace: Pace, name: str, model: Model) -> str:
    """Return the pace with its 95 % interval, and if ``model`` still holds: its captures differ as much."""
    low, high = pace.factor * exp(-pace.reach), pace.factor * exp(pace.reach)
    reach = max(drift_reach(model), LEAST_DRIFT)
    verdict = "it holds" if pace.reach <= reach else "too uncertain to say"
    if abs(log(pace.factor)) > hypot(reach, pace.reach):
        verdict = "it has drifted: forecast with the scaled one, or fit again"
    return (
        f"pace: steps of {name} took {pace.factor:.3f} of the model's time (95 % interval {low:.3f} to {high:.3f}, "
        f"{pace.intervals:,} intervals); another such capture may differ by {pace.log_sd:.1%}\n"
        f"the model expects {exp(-reach):.2f} to {exp(reach):.2f}: {verdict}"
    )


def drift_reach(model: Model) -> float:
    """Return how far log(pace) may be from 0 by the drift between the model's captures, at the ends of 95 %."""
    score = stdtrit(model.drift_freedom, INTERVAL[1]) if model.drift_freedom else ndtri(INTERVAL[1])
    return float(score) * model.drift_log_sd
