"""Coverage of intervals, bands and gates: nominal against actual, on queues and engines that are known.

    python -m scripts.coverage [intervals gates sessions limits alarms] [--runs N] [--seed K]

``intervals``: of M/M/1 queues that begin empty, against quantiles pooled over many runs. ``gates``: bands and gates of
a first-come-first-served engine whose work is known; its captures differ by a drift of their speed, and each forecast
takes the drift from k captures, as ``sim fit`` does. ``sessions``: the real fit and validation of sessions of several
turns on the simulated engine. ``limits``: by calculation, how often any test of the speed passes a model that is 15 %
slow. ``alarms``: days of ``sim watch`` over an engine that drifts as its model's captures did. docs/dev/statistics.md
keeps the tables.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
from scipy.special import nctdtr, ndtr, ndtri, stdtrit

from measure.resampling import busy_units, draw_weights
from measure.survival import EVENT, Waits, make_waits
from measure.table import table_lines
from measure.thresholds import BELOW_SATURATION
from report.compare.cells import (
    LEVEL_SHARES,
    Cell,
    gated_error,
    judge,
    measure,
)
from report.compare.ensembles import (
    coverage,
    measure_ensemble,
    with_members,
)
from report.compare.gates import MIN_P
from report.compare.results import LEVELS, CachedAgreement, Coverage, DurationError, PairCohort
from scripts.knownengine import calibration, capture, known_engine, scaled, sessions, steady
from sim.fit.fitting import FitConfig, fit_traces
from sim.fit.pace import Pace
from sim.forecast.baselines import queued
from sim.forecast.validate import ValidateConfig, validate
from sim.latency.modelfile import Model, default_model, save_model
from sim.watch.judgement import DriftAlarm, allowed_reach, is_outside
from sim.watch.modelwatch import ModelWatch, WatchConfig
from tracefile import Record, load_trace
from tracefile.records.arrays import FloatArray

LOADS = (
    (0.001, 20),
    (0.001, 100),
    (0.001, 400),
    (0.2, 100),
    (0.5, 100),
    (0.5, 400),
    (0.8, 100),
    (0.8, 400),
    (0.95, 400),
    (1.2, 400),
)
DRAWS, MEMBERS = 200, 64
NOISE, REQUESTS, UTILIZATION = 0.1, 100, 0.5


@dataclass(frozen=True, slots=True)
class Engine:
    """A known engine, the captures that its model was fitted on, and an error of the model."""

    name: str
    drift: float
    captures: int
    factor: float
    judged: int = 1
    """Captures of the judged load."""


ENGINES = (
    Engine("right, no drift", 0.0, 3, 1.0),
    Engine("right, 5 % drift", 0.05, 5, 1.0),
    Engine("right, 5 % drift", 0.05, 2, 1.0),
    Engine("right, 5 % drift", 0.05, 5, 1.0, 3),
    Engine("× 1.15, no drift", 0.0, 3, 1.15),
    Engine("× 1.15, 5 % drift", 0.05, 5, 1.15),
    Engine("× 1.15, 5 % drift", 0.05, 2, 1.15),
    Engine("× 1.15, 5 % drift", 0.05, 5, 1.15, 3),
    Engine("right, 5 % drift", 0.05, 10, 1.0, 3),
    Engine("× 1.15, 5 % drift", 0.05, 10, 1.15, 3),
)
JUDGED_PER_FIT = 4
"""Judged loads that one fit forecasts, to spare fits."""
DRIFTS = ((0.0, 1.0), (0.05, 0.25), (0.05, 1.0), (0.05, 6.0))
"""Of an engine's speed, and hours that it lasts."""
DAY_MIN, WINDOW_MIN, WATCHED_MIN, PER_S = 1440, 10, 12, 100.0
CAPTURES, LOADS_JUDGED = (2, 3, 5, 10, 30), (1, 2, 3, 5)


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
            str(engine.judged),
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
    truth, *again = (measure(served(random.normal(0.0, engine.drift)), rows, None) for _ in range(engine.judged))
    other = measure_ensemble([served(speed) for speed in speeds.tolist()], rows, None)
    pair = cohort_of(truth, other, [judge(truth, one, None) for one in again])
    return with_members(coverage({"all": pair}), [(pair, truth, other)], engine.captures), pair.ttft


def cohort_of(truth: Cell, other: Cell, again: Sequence[DurationError]) -> PairCohort:
    nothing = DurationError(n_truth=0, n_other=0, judged=False)
    cached = CachedAgreement(joined=0, n=0, unreported_truth=0, unreported_other=0, judged=False)
    return PairCohort(cached=cached, ttft=judge(truth, other, None, again), tpot=nothing, itl=nothing, e2e=nothing)


def gates_of(found: Coverage, error: DurationError) -> list[bool]:
    """Return if the gates on p50, p90, p99 and the bands pass."""
    kept = [
        gated_error(getattr(error, level)) <= max(limit, found.noise.get(level, 0.0))
        for level, limit in BELOW_SATURATION.items()
    ]
    return [*kept, (found.p_value or 0.0) >= MIN_P]


def session_rows(runs: int, seed: int) -> Iterator[list[str]]:
    """Yield a row for each engine: forecasts of sessions, really fitted and validated, that pass each default gate."""
    with TemporaryDirectory() as folder:
        for drift, captures in dict.fromkeys((one.drift, one.captures) for one in ENGINES):
            engines = [one for one in ENGINES if (one.drift, one.captures) == (drift, captures)]
            found: dict[Engine, list[list[bool]]] = {engine: [] for engine in engines}
            for run in range(-(-runs // JUDGED_PER_FIT)):
                for engine, passed in fitted_and_judged(Path(folder), engines, np.random.default_rng([seed, run])):
                    found[engine].append(passed)
            for engine, verdicts in found.items():
                shares = [f"{share:.2f}" for share in np.array(verdicts).mean(axis=0)]
                whole = np.array(verdicts).all(axis=1).mean()
                yield [engine.name, str(captures), str(engine.judged), *shares, f"{whole:.2f}"]


def fitted_and_judged(
    folder: Path, engines: Sequence[Engine], random: np.random.Generator
) -> Iterator[tuple[Engine, list[bool]]]:
    """Fit captures of one drift, forecast sessions that were captured later, and yield which default gates pass."""
    known, drift, captures = known_engine(), engines[0].drift, engines[0].captures

    def captured(name: str, load: Iterator[Record]) -> Path:
        path, engine = folder / f"{name}.jsonl", scaled(known, float(np.exp(random.normal(0.0, drift))))
        path.unlink(missing_ok=True)
        return capture(path, load, engine, int(random.integers(1 << 62)))

    paths = tuple(captured(f"calibration-{place}", calibration(place)) for place in range(captures))
    config = FitConfig(paths, folder / "model.json", {}, bootstrap=64, frontend="parallel", extra_terms=())
    model = fit_traces(config).model
    for _ in range(JUDGED_PER_FIT):
        load = int(random.integers(1 << 31))
        traces = [captured(f"sessions-{place}", sessions(load)) for place in range(max(one.judged for one in engines))]
        for engine in engines:
            asked = ValidateConfig(
                trace=traces[0],
                again=tuple(traces[1 : engine.judged]),
                overrides={},
                cold_prompts=False,
                replay_sessions=None,
                members=MEMBERS,
                seed=load,
                bootstrap=0,
                gates=(),
                standard=True,
                json=False,
            )
            gates = validate(asked, scaled(model, engine.factor)).result.gates
            yield engine, [gate.passed for gate in gates]


def limit_rows() -> Iterator[list[str]]:
    """Yield a row for each number of judged captures: the share that passes a model 15 % slow, at 5 % drift.

    Of a t test on the speed that passes 90 % of right models, with the drift known from the fitted captures, then from
    these and the judged ones together, then exactly: no test of the speed does better.
    """
    for judged_loads in LOADS_JUDGED:
        cells = []
        for captures in CAPTURES:
            off = np.log(1.15) / (0.05 * np.sqrt(1.0 / judged_loads + 1.0 / captures))
            shares = []
            for freedom in (captures - 1, captures + judged_loads - 2):
                end = stdtrit(freedom, 0.95)
                shares.append(float(nctdtr(freedom, off, end) - nctdtr(freedom, off, -end)))
            shares.append(float(ndtr(ndtri(0.95) - off) - ndtr(-ndtri(0.95) - off)))
            cells.append(" / ".join(f"{share:.2f}" for share in shares))
        yield [str(judged_loads), *cells]


def alarm_rows(runs: int, seed: int) -> Iterator[list[str]]:
    """Yield a row for each drift and number of fitted captures: alarms of ``sim watch`` in days of an unchanged engine.

    Then those that last an hour, the share of time with an alarm, and of engines slower by 1.3 told within an hour.
    """
    error, reach = measured_error(seed)
    for drift, hours in DRIFTS:
        for captures in (3, 5, 10):
            random, found = np.random.default_rng(seed), list[list[float]]()
            for _ in range(runs):
                logs = random.normal(0.0, drift, captures)
                spread = float(logs.std(ddof=1)) * np.sqrt(1.0 + 1.0 / captures)
                model = msgspec.structs.replace(default_model(), drift_log_sd=spread, drift_freedom=captures - 1)
                day = paces(random, drift, hours) - logs.mean() + random.normal(0.0, error, DAY_MIN)
                on = watched(model, day, reach)
                lengths = [len(list(same)) for is_on, same in groupby(on) if is_on]
                told = watched(model, day[:60] + np.log(1.3), reach)
                found.append([len(lengths), sum(length >= 60 for length in lengths), sum(on) / len(on), any(told)])
            alarms, long, share, told_share = np.mean(np.array(found), axis=0)
            name = f"{drift:.0%}, lasting {hours:g} h" if drift else "none"
            yield [name, str(captures), f"{alarms:.1f}", f"{long:.1f}", f"{share:.1%}", f"{told_share:.0%}"]


def paces(random: np.random.Generator, drift: float, hours: float) -> FloatArray:
    """Return log(pace) of each minute's last ten: a normal process of this deviation and correlation time."""
    kept = float(np.exp(-1.0 / (60.0 * hours)))
    steps = random.normal(0.0, drift, DAY_MIN + WINDOW_MIN - 1) * np.sqrt(1.0 - kept**2)
    steps[0] = random.normal(0.0, drift)
    each = list(accumulate(steps.tolist(), lambda before, step: kept * before + step))
    return np.convolve(each, np.full(WINDOW_MIN, 1.0 / WINDOW_MIN), "valid")


def watched(model: Model, logs: FloatArray, reach: float) -> list[bool]:
    """Return at each judgement whether the alarm is on."""
    alarm, allowed, on = DriftAlarm(), allowed_reach(model), []
    log_sd = reach / Pace(1.0, 1.0, 7, 1_000).reach
    for minute, log_pace in enumerate(logs.tolist()):
        alarm.judge(outside=is_outside(Pace(float(np.exp(log_pace)), log_sd, 7, 1_000), allowed), at_ms=6e4 * minute)
        on.append(alarm.drifted)
    return on


def measured_error(seed: int) -> tuple[float, float]:
    """Return error and told reach of log(pace) at ``PER_S`` requests a second, by the watch of a known engine."""
    engine = scaled(known_engine(), 0.1)
    with TemporaryDirectory() as folder:
        trace, path = Path(folder) / "t.jsonl", Path(folder) / "model.json"
        save_model(engine, path)
        load = steady(seed, PER_S, int(PER_S * 60.0 * WATCHED_MIN))
        meta, records = load_trace(capture(trace, load, engine, seed))
        watch, found = ModelWatch(WatchConfig(trace, path, {}, 6e4 * WINDOW_MIN, 6e4, members=2, seed=seed)), []
        for record in sorted(records, key=lambda one: one.end_ms() or 0.0):
            watch.take(record, meta)
            if watch.is_due and (pace := watch.judge().pace):
                found.append((np.log(pace.factor), np.log(pace.high / pace.factor)))
    error, reach = np.array(found[1:]).T
    return float(np.sqrt(np.mean(error**2))), float(np.median(reach))


TABLES: dict[str, tuple[list[str], Callable[[int, int], Iterator[list[str]]]]] = {
    "intervals": (["utilization", "n", "given", *(f"{level} (closed)" for level in LEVELS)], interval_rows),
    "gates": (["model", "fitted", "judged", "inside band", *BELOW_SATURATION, "bands", "all gates"], gate_rows),
    "sessions": (
        ["model", "fitted", "judged", "cached tokens", *BELOW_SATURATION, "bands", "baselines", "all gates"],
        session_rows,
    ),
    "alarms": (["drift", "fitted", "alarms a day", "of an hour", "time on", "× 1.3 told in 1 h"], alarm_rows),
    "limits": (["judged", *(f"{captures} fitted" for captures in CAPTURES)], lambda runs, seed: limit_rows()),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"some of {', '.join(TABLES)} (default: all)")
    parser.add_argument("--runs", type=int, default=200, help="of each row (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default 0)")
    flags = parser.parse_args(argv)
    for name in flags.tables or TABLES:
        if name not in TABLES:
            parser.error(f"{name}: expected some of {', '.join(TABLES)}")
        headings, rows_of = TABLES[name]
        print(*table_lines(headings, list(rows_of(flags.runs, flags.seed)), "<"), "", sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
