"""Ensembles of forecasts of one load: the spread that the fit's uncertainty and the noise make.

A member is a draw of the model's parameters times one speed for the whole run, and a noise seed of its own. Members
keep their noise under another cache, rate or setting, so that most of it cancels in the difference member by member.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from measure.cache.vectors import array_of
from measure.distributions import ndtri, stdtrit
from measure.quantiles import interval_indices, quantile
from measure.resampling import CONFIDENCE
from sim.engine.columns import ResultColumns
from sim.engine.deployment import Deployment
from sim.engine.simulatedrequest import PARENT_FAILED
from sim.engine.simulation import Simulation, request_columns, simulate, thinned_gaps
from sim.latency.modelfile import Model, Parameter
from sim.latency.noise import WIDEST_LOG
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import Arrivals
from tracefile.commandline.processes import results
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.batches import Batch

MOST_GAPS = 1 << 17
"""Gaps kept of a member; of more, every n-th."""
RunOne = Callable[[Model, int | None], dict[str, npt.NDArray[Any]]]
"""Runs a load on a member's model with a noise seed; returns a column for each field of ``Forecast``."""
LayOut = Callable[[Arrivals], RunOne]
"""Lays a load out for the runs of all members."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Results of n requests in each of m members: arrays of shape (m, n) but for ``gaps_ms``, in arrival order.

    Times in ms; NaN: the request did not get so far.
    """

    arrivals: Arrivals
    config: EngineConfig
    outcome: npt.NDArray[np.int8]
    arrival_ms: FloatArray
    """A child's follows its parent's predicted end; NaN: its parent was never served."""
    ttft_ms: FloatArray
    e2e_ms: FloatArray
    output_tokens: IntArray
    cached_tokens: IntArray
    """At the first admission; −1: never admitted."""
    preemptions: IntArray
    gaps_ms: tuple[FloatArray, ...]
    """Per member: gaps between tokens of all requests, at most ``MOST_GAPS``, evenly thinned."""

    @property
    def members(self) -> int:
        return len(self.ttft_ms)

    @property
    def tpot_ms(self) -> FloatArray:
        """Mean gap between a request's tokens; NaN with fewer than two."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1.0, np.nan)
        return np.asarray((self.e2e_ms - self.ttft_ms) / gaps)


def members(model: Model, count: int, seed: int, beyond_log_sd: float = 0.0) -> list[Model]:
    """Return ``count`` models that the captures allow: draws in random order, each once before any comes again.

    Speeds are quantiles of Student's t (normal where drift is known) at the ranks 1 to ``count`` of ``count`` + 1;
    ``beyond_log_sd`` spreads them further, where a load is beyond what was fitted.
    """
    random = np.random.default_rng(seed & 0xFFFFFFFFFFFFFFFF)
    rows: Sequence[Sequence[float]] = model.draws or [[parameter.value for parameter in model.parameters.values()]]
    order = np.resize(random.permutation(len(rows)), count)
    shares = (random.permutation(count) + 1.0) / (count + 1)
    scores = stdtrit(model.drift_freedom, shares) if model.drift_freedom else ndtri(shares)
    farther = beyond_log_sd * ndtri((random.permutation(count) + 1.0) / (count + 1)) if beyond_log_sd else 0.0
    logs = model.drift_log_sd * scores + farther
    speeds = np.exp(np.clip(logs, -WIDEST_LOG, WIDEST_LOG)).tolist()
    return [_member(model, rows[row], speed) for row, speed in zip(order.tolist(), speeds, strict=True)]


def forecast(
    arrivals: Arrivals,
    config: EngineConfig,
    members: Sequence[Model],
    *,
    seed: int | None = 0,
    done: Callable[[], object] = lambda: None,
    procs: int | None = None,
    lay_out: LayOut | None = None,
    deployment: Deployment | None = None,
) -> Forecast:
    """Run ``arrivals`` on every member; ``done`` is called after each. ``procs``: see ``results``.

    Member i's noise depends on ``seed`` and i alone; None: the noise's medians. ``lay_out``: prepares the runs
    (``sim.forecast.fleets``); None: of one engine, with the memory of ``deployment``.
    """
    needed = arrivals
    if lay_out is None:  # only a router reads records
        needed = replace(arrivals, batch=Batch([]))
        lay_out = partial(_on_one_engine, config=config, deployment=deployment)
    run_member, by_number = _MemberRuns(needed, members, seed, lay_out), dict[int, dict[str, npt.NDArray[Any]]]()
    for number, columns in results(run_member, range(len(members)), procs=procs):
        by_number[number] = columns
        done()
    seen = [by_number[number] for number in range(len(members))]
    gaps_ms = tuple(run.pop("gaps_ms") for run in seen)
    stacked = {name: np.stack([run[name] for run in seen]) for name in seen[0]}
    return Forecast(arrivals, config, gaps_ms=gaps_ms, **stacked)


@dataclass(frozen=True)
class _MemberRuns:
    """Runs a member by its number; sent to each process, which lays the load out before its first member."""

    arrivals: Arrivals
    members: Sequence[Model]
    seed: int | None
    lay_out: LayOut

    @cached_property
    def _run_one(self) -> RunOne:
        return self.lay_out(self.arrivals)

    def __call__(self, number: int) -> dict[str, npt.NDArray[Any]]:
        noise_seed = None
        if self.seed is not None:
            sequence = np.random.SeedSequence((self.seed & 0xFFFFFFFFFFFFFFFF, number))
            noise_seed = int(sequence.generate_state(1, np.uint64)[0])
        return self._run_one(self.members[number], noise_seed)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def _on_one_engine(arrivals: Arrivals, *, config: EngineConfig, deployment: Deployment | None) -> RunOne:
    columns = request_columns(arrivals, config.block_size)
    return lambda member, seed: _seen(simulate(arrivals, config, member, seed, columns=columns, deployment=deployment))


def interval(values: FloatArray) -> tuple[float, float, float]:
    """Return the median of the members' values and the ends of ``CONFIDENCE``; NaN values are left out."""
    kept = np.sort(values[~np.isnan(values)])
    if not len(kept):
        return np.nan, np.nan, np.nan
    low, high = interval_indices(CONFIDENCE, len(kept))
    return quantile(kept, 0.5), float(kept[low]), float(kept[high])


def _seen(run: Simulation) -> dict[str, npt.NDArray[Any]]:
    results = ResultColumns(run.requests)
    return seen_columns(results) | {
        "cached_tokens": array_of(results.cached_tokens, np.int64),
        "preemptions": array_of(results.preemptions, np.int64),
        "gaps_ms": thinned_gaps([(run.requests, run.delivered_ms)], MOST_GAPS),
    }


def seen_columns(results: ResultColumns) -> dict[str, npt.NDArray[Any]]:
    """Return what clients see of the requests of a run, by field of ``Forecast``."""
    outcome = array_of(results.outcome, np.int64)
    return {
        "outcome": outcome.astype(np.int8),
        "arrival_ms": np.where(outcome == PARENT_FAILED, np.nan, array_of(results.arrival_ms, np.float64)),
        "ttft_ms": array_of(results.ttft_ms, np.float64),
        "e2e_ms": array_of(results.e2e_ms, np.float64),
        "output_tokens": array_of(results.num_delivered, np.int64),
    }


def _member(model: Model, values: Sequence[float], speed: float) -> Model:
    parameters = {
        name: Parameter(value=value * speed, unit=known.unit)
        for (name, known), value in zip(model.parameters.items(), values, strict=True)
    }
    return msgspec.structs.replace(model, parameters=parameters, draws=[], drift_log_sd=0.0)
