"""Coverage of intervals, bands and gates: nominal against actual, on queues and engines that are known.

    python -m scripts.coverage [--runs N] [--seed K]

Intervals are of M/M/1 queues that begin empty, against quantiles pooled over many runs. Bands and gates are of a
first-come-first-served engine whose work is known: its captures differ by a drift of their speed, and each forecast
takes the drift from k captures, as ``sim fit`` does. docs/dev/statistics.md keeps the tables.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from measure.resampling import busy_units, draw_weights
from measure.survival import EVENT, Waits, make_waits
from measure.table import table_lines
from report.compare.cells import (
    LEVEL_SHARES,
    Cell,
    judge,
    measure,
)
from report.compare.ensembles import (
    coverage,
    measure_ensemble,
    with_members,
)
from report.compare.gates import BELOW_SATURATION, MIN_P
from report.compare.results import LEVELS, CachedAgreement, Coverage, DurationError, PairCohort
from sim.forecast.baselines import queued
from tracefile.records.arrays import FloatArray

LOADS = ((0.2, 100), (0.5, 100), (0.5, 400), (0.8, 100), (0.8, 400), (0.95, 400), (1.2, 400))
DRAWS, MEMBERS = 200, 64
NOISE, REQUESTS, UTILIZATION = 0.1, 100, 0.5


@dataclass(frozen=True, slots=True)
class Engine:
    """A known engine, the captures that its model was fitted on, and an error of the model."""

    name: str
    drift: float
    captures: int
    factor: float


ENGINES = (
    Engine("right, no drift", 0.0, 3, 1.0),
    Engine("right, 5 % drift", 0.05, 5, 1.0),
    Engine("right, 5 % drift", 0.05, 2, 1.0),
    Engine("× 1.15, no drift", 0.0, 3, 1.15),
    Engine("× 1.15, 5 % drift", 0.05, 5, 1.15),
    Engine("× 1.15, 5 % drift", 0.05, 2, 1.15),
)


def mm1(random: np.random.Generator, utilization: float, n: int) -> tuple[FloatArray, FloatArray]:
    """Return arrivals and waits of one run of a queue that begins empty."""
    arrival_ms = np.cumsum(random.exponential(1.0 / utilization, n))
    return arrival_ms, queued(arrival_ms, random.exponential(1.0, n))


def sample(wait_ms: FloatArray) -> Waits:
    return make_waits(wait_ms, np.full(len(wait_ms), EVENT, dtype=np.int8), np.arange(len(wait_ms)))


def interval_rows(runs: int, seed: int) -> Iterator[list[str]]:
    """Yield a row for each load: shares of intervals that hold the quantile, and shares that are closed."""
    for utilization, n in LOADS:
        pooled = np.random.default_rng(seed)
        truth_ms = np.quantile(np.concatenate([mm1(pooled, utilization, n)[1] for _ in range(2_000)]), LEVEL_SHARES)
        random, found = np.random.default_rng(seed + 1), []
        for run in range(runs):
            arrival_ms, wait_ms = mm1(random, utilization, n)
            units = busy_units(arrival_ms, wait_ms, np.arange(n))
            found.append(measure(sample(wait_ms), units, draw_weights(int(units.max()) + 1, DRAWS, run)))
        low_ms, high_ms = (np.array([getattr(cell, end) for cell in found]) for end in ("low_ms", "high_ms"))
        there, closed = ~np.isnan(low_ms[:, 0]), np.isfinite(high_ms)
        held = (low_ms <= truth_ms) & (truth_ms <= high_ms)
        shares = ["–"] * len(LEVELS)
        if there.any():
            shares = [f"{held[there, at].mean():.2f} ({closed[there, at].mean():.2f})" for at in range(len(LEVELS))]
        yield [f"{utilization:g}", str(n), f"{there.mean():.2f}", *shares]


def gate_rows(runs: int, seed: int) -> Iterator[list[str]]:
    """Yield a row for each engine: quantiles inside the bands, and forecasts that pass each gate."""
    for engine in ENGINES:
        random = np.random.default_rng(seed)
        found = [judged(random, engine) for _ in range(runs)]
        gates = [gates_of(one, error) for one, error in found]
        inside = sum(one.inside for one, _ in found) / max(sum(one.quantiles for one, _ in found), 1)
        passed = np.array(gates).mean(axis=0)
        yield [
            engine.name,
            str(engine.captures),
            f"{inside:.2f}",
            *(f"{share:.2f}" for share in passed),
            f"{np.array(gates).all(axis=1).mean():.2f}",
        ]


def judged(random: np.random.Generator, engine: Engine) -> tuple[Coverage, DurationError]:
    """Capture a load, forecast it, and hold the one to the other."""
    arrival_ms = np.cumsum(random.exponential(1.0 / UTILIZATION, REQUESTS))
    work_ms = random.lognormal(-0.125, 0.5, REQUESTS)

    def served(log_speed: float) -> Waits:
        return sample(queued(arrival_ms, work_ms * np.exp(log_speed + random.normal(0.0, NOISE, REQUESTS))))

    logs = random.normal(0.0, engine.drift, engine.captures)
    spread = float(logs.std(ddof=1)) * np.sqrt(1.0 + 1.0 / engine.captures)
    scores = stdtrit(engine.captures - 1, np.arange(1, MEMBERS + 1) / (MEMBERS + 1))
    speeds = logs.mean() + np.log(engine.factor) + spread * scores
    rows = np.arange(REQUESTS)
    truth = measure(served(random.normal(0.0, engine.drift)), rows, None)
    other = measure_ensemble([served(speed) for speed in speeds.tolist()], rows, None)
    pair = cohort_of(truth, other)
    return with_members(coverage({"all": pair}), [(pair, truth, other)]), pair.ttft


def cohort_of(truth: Cell, other: Cell) -> PairCohort:
    nothing = DurationError(n_truth=0, n_other=0, judged=False)
    cached = CachedAgreement(joined=0, n=0, unreported_truth=0, unreported_other=0, judged=False)
    return PairCohort(cached=cached, ttft=judge(truth, other, None), tpot=nothing, itl=nothing, e2e=nothing)


def gates_of(found: Coverage, error: DurationError) -> list[bool]:
    """Return if the gates on p50, p90, p99 and the bands pass."""
    kept = [
        getattr(error, level).error <= max(limit, found.noise.get(level, 0.0))
        for level, limit in BELOW_SATURATION.items()
    ]
    return [*kept, (found.p_value or 0.0) >= MIN_P]


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="of each row (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default 0)")
    flags = parser.parse_args(argv)
    headings = ["utilization", "n", "given", *(f"{level} (closed)" for level in LEVELS)]
    print(*table_lines(headings, list(interval_rows(flags.runs, flags.seed)), "<"), "", sep="\n")
    headings = ["model", "captures", "inside band", *BELOW_SATURATION, "bands", "all gates"]
    print(*table_lines(headings, list(gate_rows(flags.runs, flags.seed)), "<"), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
