"""Judge forecasts from the captures' files alone: fit on the calibrations, forecast every other load, hold each against
what was captured. Takes minutes and needs no engine, so it is done again whenever the simulator gets better."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec

from measure.thresholds import TOO_UNCERTAIN
from report.compare.cells import MIN_CELL, gated_error
from report.compare.gates import failures
from report.compare.results import Comparison, DurationError, LabelCohort, QuantileError
from report.compare.results import Quantile as Figure
from scripts.engine_home import CORES
from scripts.fidelity.loads import SCHEDULER, SCHEDULERS, Capture, Way
from scripts.fidelity.manifest import read_manifest, trace_path
from scripts.fidelity.steps import StepTimes, step_times
from scripts.job import Command, Workspace
from sim.latency.modelfile import load_model

LEVELS = ("p50", "p90", "p99")
FORECAST_WAYS: tuple[Way, ...] = ("warm", "small", "uncached", "cold-replayed")
COLD_WAYS: tuple[Way, ...] = ("uncached", "uncached-again", "cold-replayed")
AGAIN: dict[Way, tuple[Way, ...]] = {"warm": ("again", "again-2"), "uncached": ("uncached-again",)}
"""Captures that repeat a way."""
UNGATED = ("--no-default-gates",)


class Quantile(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT quantile, captured and forecast, as ``sim validate`` judges it. Null: beyond the longest TTFT seen."""

    captured_ms: float | None
    forecast_ms: float | None
    error: float | None
    """(forecast − captured) / captured."""
    judged_error: float | None
    """|Error| that gates take: against the mean of the captures. Infinite: one side alone reaches the quantile."""
    band_low: float | None
    band_high: float | None
    """The forecast's 90 % band over the captured value, − 1."""
    inside_band: bool | None
    """The captured one lies in that band."""
    captures: int
    """Captures of the load, the cold one measured in both ways."""
    spread: float | None
    """A/A: the largest of these over the smallest, − 1. Null: one capture."""
    thin: bool
    """The slowest request by another name."""


class Paced(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT quantile forecast at the pace of the capture that judges it, for every capture of a load in one way."""

    errors: list[float]
    """(forecast − captured) / captured, a capture each. Infinite: one side alone reaches the quantile."""
    inside: list[bool]
    """The captured one lies in the forecast's 90 % band; a capture each."""

    @property
    def error(self) -> float | None:
        """Mean of the captures' errors. Null: none is known."""
        return fmean(self.errors) if self.errors else None


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of a predictor in one cell: absolute errors of quantiles, and Wasserstein-1 of the curves."""

    p50: float | None
    p90: float | None
    p99: float | None
    w1_ms: float | None


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Cohort of a load in one way: captured and forecast values."""

    shape: str
    load: str
    way: Way
    cohort: str
    n: int
    censored: int
    cached_n: int
    cached_exact: float | None
    """Share of requests whose cached tokens the forecast has exactly."""
    preemptions: int
    """Of the whole capture, by the engine's count."""
    offered: float
    """Offered work over what the engine can do, by the model."""
    saturated: bool
    pace: float | None
    """Time of the capture's own steps over the model's: the engine's pace, not the forecast's. Null: too few steps."""
    steps: StepTimes
    quantiles: dict[str, Quantile]
    paced: dict[str, Paced]
    """The same forecast at each capture's own pace; empty: none has one."""
    w1_ms: float | None
    baselines: dict[str, Errors]
    """The same of simpler predictors, which were told what was cached in fact."""
    failed_gates: list[str]
    """Default gates that the whole forecast fails, or leaves too uncertain to say."""


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the tables are made of."""

    cells: list[Cell]
    """Cohorts of at least ``MIN_CELL`` requests."""
    models: dict[str, dict[str, str]]
    """By shape: each parameter with its interval."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Captures of one model, and the folder for the files that judging makes of them."""

    captures: Path
    out: Path
    shape: str
    work: Workspace

    def is_there(self, load: str, way: Way = "warm") -> bool:
        """Return whether a capture was made."""
        return read_manifest(self.captures, Capture(self.shape, load, way)) is not None

    def trace(self, load: str, way: Way = "warm") -> Path:
        """A capture's trace."""
        return trace_path(self.captures, Capture(self.shape, load, way))

    @property
    def model(self) -> Path:
        """The fitted model."""
        return self.out / f"{self.shape}-model.json"

    def fit(self, calibrations: Sequence[str]) -> None:
        """Fit on the calibration captures."""
        traces = [self.trace(load) for load in calibrations]
        flags = SCHEDULERS.get(self.shape, SCHEDULER)
        self.work.run(f"{self.shape} fit", ["sim", "calibrate", *traces, *flags, "--overwrite", "-o", self.model])

    def validate(self, stage: str, load: str, way: Way, flags: Sequence[str | Path] = ()) -> Comparison:
        """``sim validate`` on one capture, by its default gates."""
        output = self.work.path(f"{self.shape}-{stage.replace(' ', '-')}.json")
        command: Command = ["sim", "validate", self.trace(load, way), "--latency-model", self.model, *flags]
        self.work.run(f"{self.shape} {stage}", [*command, "--json"], stdout=output, accept=(0, 1, 3))
        return msgspec.json.decode(output.read_bytes(), type=Comparison)

    def judge(self, load: str, way: Way) -> list[Cell]:
        """Judge one load in one way. Cold loads are forecast from the warm capture, as a what-if is."""
        label = "cold-predicted" if way in COLD_WAYS else "predicted"
        own = self.forecast(load, way, self.repeats(load, way))
        again = [self.forecast(load, one, UNGATED) for one in AGAIN.get(way, ()) if self.is_there(load, one)]
        return list(self.cells(load, way, [own, *again], label))

    def forecast(self, load: str, way: Way, flags: Sequence[str | Path]) -> Comparison:
        """Validate the forecast of one capture."""
        if way in COLD_WAYS:
            return self.validate(f"{load} {way} from warm", load, "warm", ["--cold", self.trace(load, way), *flags])
        return self.validate(f"{load} {way}", load, way, flags)

    def repeats(self, load: str, way: Way) -> list[str | Path]:
        """Flags for the load's other captures; of a cold one, those in every cold way."""
        flag = "--cold" if way in COLD_WAYS else "--repeat"
        others = [one for one in COLD_WAYS if one != way] if way in COLD_WAYS else AGAIN.get(way, ())
        return [word for one in others if self.is_there(load, one) for word in (flag, self.trace(load, one))]

    def cells(self, load: str, way: Way, captures: Sequence[Comparison], label: str) -> Iterator[Cell]:
        """The cohorts that are large enough; ``captures``: a comparison each, the judged one first."""
        found, capture = captures[0], Capture(self.shape, load, way)
        manifest = read_manifest(self.captures, capture)
        pair, facts = found.pairs[label], found.forecasts[label]
        asked = [gate for gate in found.gates if gate.expression.startswith(f"{label}: ")]
        steps = step_times(self.trace(load, way), load_model(self.model))
        paced, at_pace = f"{label}-at-pace", found.forecasts.get(f"{label}-at-pace")
        for cohort in ("turn1", "turns2+") if capture.has_sessions else ("all",):
            judged = pair.cohorts.get(cohort)
            if judged is None or judged.ttft.n_truth < MIN_CELL:
                continue
            captured = found.traces[pair.truth].cohorts[cohort]
            forecast = found.traces[label].cohorts[cohort]
            yield Cell(
                shape=self.shape,
                load=load,
                way=way,
                cohort=cohort,
                n=captured.ttft.n,
                censored=captured.ttft.censored,
                cached_n=judged.cached.n,
                cached_exact=judged.cached.exact_share,
                preemptions=manifest.preemptions if manifest else 0,
                offered=facts.utilization,
                saturated=facts.saturated,
                pace=None if at_pace is None else at_pace.pace,
                steps=steps,
                quantiles={level: quantile(level, captured, forecast, judged.ttft) for level in LEVELS},
                paced=at_own_pace([one.pairs[paced].cohorts[cohort].ttft for one in captures if paced in one.pairs]),
                w1_ms=judged.ttft.w1_ms,
                baselines={name: errors(cohorts[cohort]) for name, cohorts in found.baselines[label].items()},
                failed_gates=[
                    text.removeprefix(f"{label}: ") for text in (*failures(asked), *failures(asked, TOO_UNCERTAIN))
                ],
            )


def quantile(level: str, captured: LabelCohort, forecast: LabelCohort, judged: DurationError) -> Quantile:
    """Quantile of a cell."""
    error: QuantileError | None = getattr(judged, level)
    truth: Figure = getattr(captured.ttft, level)
    band: Figure = getattr(forecast.ttft, level)
    ends = [end / truth.value_ms - 1.0 if end and truth.value_ms else None for end in (band.low_ms, band.high_ms)]
    return Quantile(
        captured_ms=truth.value_ms,
        forecast_ms=band.value_ms,
        error=error.signed_error if error else None,
        judged_error=gated_error(error) if error and error.reached in ("both", "one") else None,
        band_low=ends[0],
        band_high=ends[1],
        inside_band=error.inside_band if error else None,
        captures=error.captures if error else 1,
        spread=error.repeat_spread if error else None,
        thin=truth.thin,
    )


def at_own_pace(captures: Sequence[DurationError]) -> dict[str, Paced]:
    """Quantiles of forecasts at the pace of each capture, against that capture alone: others had other paces."""
    found = {level: [one for each in captures if (one := getattr(each, level))] for level in LEVELS}
    return {
        level: Paced(
            errors=[error for one in all_of if (error := own_error(one)) is not None],
            inside=[one.inside_band for one in all_of if one.inside_band is not None],
        )
        for level, all_of in found.items()
        if all_of
    }


def own_error(judged: QuantileError) -> float | None:
    """Signed error against one capture; infinite: one side alone reaches the quantile; null: not known."""
    return float("inf") if judged.reached == "one" else judged.signed_error


def errors(judged: DurationError) -> Errors:
    """Errors of a judgement, for comparing predictors."""
    found: dict[str, QuantileError | None] = {level: getattr(judged, level) for level in LEVELS}
    return Errors(w1_ms=judged.w1_ms, **{level: one.error if one else None for level, one in found.items()})


def judge_all(captures: Path, out: Path, wanted: Sequence[Capture]) -> Verdicts:
    """Fit every model that was captured and judge all that there is of it."""
    work = Workspace(out / "judged")
    work.directory.mkdir(parents=True, exist_ok=True)
    made = [capture for capture in wanted if read_manifest(captures, capture) is not None]
    cells: list[Cell] = []
    models: dict[str, dict[str, str]] = {}
    for shape in dict.fromkeys(capture.shape for capture in made):
        judge = Judge(captures, out, shape, work)
        of_shape = [capture for capture in made if capture.shape == shape]
        if not (calibrations := [capture.load for capture in of_shape if capture.is_calibration]):
            print(f"{shape}: no calibration was captured; its forecasts are not judged")
            continue
        judge.fit(calibrations)
        models[shape] = parameters(judge.model)
        gates = [one for one in of_shape if one.way in FORECAST_WAYS and not one.is_calibration]
        gates = [one for one in gates if judge.is_there(one.load)]
        with ThreadPoolExecutor(len(CORES) or 1) as pool:  # each waits for its commands
            loads, ways = [one.load for one in gates], [one.way for one in gates]
            cells += [cell for found in pool.map(judge.judge, loads, ways) for cell in found]
    return Verdicts(cells=cells, models=models)


def parameters(model: Path) -> dict[str, str]:
    """A fitted model's parameters as a reader reads them."""
    found = load_model(model).parameters
    return {
        name: f"{one.value:.3g} {one.unit}"
        + (f" ({one.low:.3g} … {one.high:.3g})" if one.low is not None and one.high is not None else "")
        + ("" if one.identified else ", not identified")
        for name, one in found.items()
        if one.value or (one.high or 0.0) > 0
    }
