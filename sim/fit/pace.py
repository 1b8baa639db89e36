"""Pace of an engine: measured step time of a capture over the latency model's step time, from any traffic.

Only prefill and decode steps of the reconstructed schedule count: no queues, sessions or noise.
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
"""Consecutive blocks of a capture, whose spread is the uncertainty of the pace."""
_PER_BLOCK = FEWEST_INTERVALS // 2


@dataclass(frozen=True, slots=True)
class Pace:
    """Measured over modelled step time of a capture, with uncertainty."""

    factor: float
    log_sd: float
    """Standard deviation of log(factor) of a later block of such traffic."""
    freedom: int
    """Degrees of freedom of ``log_sd``."""
    intervals: int

    @property
    def reach(self) -> float:
        return drift_of_mean(Drift(self.log_sd, self.freedom), self.freedom + 1)


def capture_steps(meta: Meta, records: list[Record], model: Model, path: str) -> Observations:
    """Return the intervals of a capture, with prefill and decode work priced by ``model.costs``."""
    hashed = any(record.block_hashes is not None for record in records)
    arrivals = plan_arrivals(meta, records, model.engine.block_size, path=path, cold_prompts=not hashed)
    return priced_steps(prepare_capture(records, arrivals, model.engine, path), model)


def priced_steps(capture: Capture, model: Model) -> Observations:
    schedule = schedule_of(capture, model.engine)
    observed = observe(capture.records, schedule, model.frontend_placement, model.costs)
    return with_late_reads_joined(observed, observed.counts @ np.array(model.costs))


def measure_pace(observed: Observations, model: Model, path: str) -> Pace:
    """Return the pace of ``capture_steps``. Raises InputError for too few intervals between tokens."""
    intervals = len(observed.measured_ms)
    if intervals < FEWEST_INTERVALS:
        raise InputError(
            f"{path}: {intervals} intervals between tokens; expected {FEWEST_INTERVALS} for a pace, of streamed outputs"
        )
    costs = np.array(model.costs)
    blocks = np.array_split(np.arange(intervals), min(MOST_BLOCKS, intervals // _PER_BLOCK))
    spread = float(np.std([speed(observed, costs, block) for block in blocks], ddof=1))
    return Pace(
        factor=float(np.exp(speed(observed, costs))),
        log_sd=spread * sqrt(1 + 1 / len(blocks)),
        freedom=len(blocks) - 1,
        intervals=intervals,
    )


def with_pace(model: Model, pace: Pace) -> Model:
    """Return the latency model at another pace: all costs times the factor; drift is the error of the pace."""
    return msgspec.structs.replace(
        model,
        parameters={name: _paced(parameter, pace) for name, parameter in model.parameters.items()},
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
    """Return ``model`` at the pace of the capture in ``path``, which can then not validate it. Raises InputError."""
    meta, records = load_trace(path)
    pace = measure_pace(capture_steps(meta, records, model, str(path)), model, str(path))
    return msgspec.structs.replace(
        with_pace(model, pace),
        fitted_on=[*model.fitted_on, fit_trace(path, trace_digest(path), records)],
        diagnostics={**model.diagnostics, "pace": {**asdict(pace), "message": describe_pace(pace, path.name, model)}},
    )


LEAST_DRIFT = log(1.05)
"""Largest drift that is not reported: forecast bands are wider."""


def describe_pace(pace: Pace, name: str, model: Model) -> str:
    """Return the pace with its 95 % interval, and whether the latency model still holds within its drift."""
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
    """Return the bound of |log(pace)| from the drift between the model's captures, at 95 %."""
    score = stdtrit(model.drift_freedom, INTERVAL[1]) if model.drift_freedom else ndtri(INTERVAL[1])
    return float(score) * model.drift_log_sd
