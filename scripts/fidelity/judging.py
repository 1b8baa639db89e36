"""Judge forecasts from the captures' files alone: fit on the calibrations, forecast every other load, hold each against
what was captured. Takes minutes and needs no engine, so it is done again whenever the simulator gets better."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from report.compare.cells import MIN_CELL
from report.compare.results import Comparison, DurationError, LabelCohort, QuantileError
from scripts.fidelity.loads import Capture, Way
from scripts.fidelity.manifest import read_manifest, trace_path
from scripts.fidelity.pace import Pace, pace
from scripts.job import Command, Workspace
from sim.latency.modelfile import load_model

LEVELS = ("p50", "p90", "p99")
FORECAST_WAYS: tuple[Way, ...] = ("warm", "small", "uncached", "cold-replayed")
OTHER_COLD_WAY: dict[Way, Way] = {"uncached": "cold-replayed", "cold-replayed": "uncached"}
# vLLM tells neither; scripts/vllm_engine.py starts it so.
SCHEDULER = ("--max-num-seqs", "32", "--max-num-batched-tokens", "2048")


class Quantile(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT quantile, captured and forecast. Null: beyond the longest TTFT that was seen."""

    captured_ms: float | None
    forecast_ms: float | None
    error: float | None
    """(forecast − captured) / captured."""
    low: float | None
    high: float | None
    """90 % interval of the error, by session."""
    inside_band: bool | None
    """The captured one lies in the forecast's 90 % band."""
    aa_error: float | None
    """The same load captured again, against this time; a cold load in the other way to measure it. Null: never."""
    inside_aa: bool | None
    """The forecast is off by no more than that."""


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
    pace: Pace
    """How long the capture's own steps took over what the model gives them: the engine's pace, not the forecast's."""
    quantiles: dict[str, Quantile]
    w1_ms: float | None
    w1_aa_ms: float | None
    baselines: dict[str, Errors]
    """The same of simpler predictors, which were told what was cached in fact."""


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
    flags: Sequence[str] = field(default=SCHEDULER)

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
        self.work.run(f"{self.shape} fit", ["sim", "fit", *traces, *self.flags, "-o", self.model])

    def validate(self, stage: str, load: str, way: Way, flags: Sequence[str | Path] = ()) -> Comparison:
        """``sim validate`` on one capture."""
        output = self.work.path(f"{self.shape}-{stage.replace(' ', '-')}.json")
        command: Command = ["sim", "validate", self.trace(load, way), "--latency-model", self.model, *flags]
        self.work.run(f"{self.shape} {stage}", [*command, "--no-default-gates", "--json"], stdout=output)
        return msgspec.json.decode(output.read_bytes(), type=Comparison)

    def judge(self, load: str, way: Way) -> list[Cell]:
        """Judge one load in one way. Cold loads are forecast from the warm capture, as a what-if is."""
        own = self.validate(f"{load} {way}", load, way, self.yardstick(load, way))
        if way not in OTHER_COLD_WAY:
            return list(self.cells(load, way, own, "predicted", own))
        flags: list[str | Path] = ["--cold", self.trace(load, way)]
        found = self.validate(f"{load} {way} from warm", load, "warm", flags)
        return list(self.cells(load, way, found, "cold-predicted", own))

    def yardstick(self, load: str, way: Way) -> list[str | Path]:
        """The load captured again, where it was."""
        return ["--repeat", self.trace(load, "again")] if way == "warm" and self.is_there(load, "again") else []

    def cells(self, load: str, way: Way, found: Comparison, label: str, own: Comparison) -> Iterator[Cell]:
        """The cohorts that are large enough; ``own`` has the baselines and the A/A of the capture itself."""
        capture = Capture(self.shape, load, way)
        manifest = read_manifest(self.captures, capture)
        pair, facts = found.pairs[label], found.forecasts[label]
        steps = pace(self.trace(load, way), load_model(self.model))
        for cohort in ("turn1", "turns2+") if capture.has_sessions else ("all",):
            judged = pair.cohorts.get(cohort)
            if judged is None or judged.ttft.n_truth < MIN_CELL:
                continue
            again = own.pairs["again"].cohorts[cohort].ttft if "again" in own.pairs else None
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
                pace=steps,
                quantiles={level: quantile(level, captured, forecast, judged.ttft, again) for level in LEVELS},
                w1_ms=judged.ttft.w1_ms,
                w1_aa_ms=again.w1_ms if again else None,
                baselines={name: errors(cohorts[cohort]) for name, cohorts in own.baselines.items()},
            )


def quantile(
    level: str, captured: LabelCohort, forecast: LabelCohort, judged: DurationError, again: DurationError | None
) -> Quantile:
    """Quantile of a cell."""
    error: QuantileError | None = getattr(judged, level)
    aa: QuantileError | None = getattr(again, level) if again else None
    signed, aa_signed = error.signed_error if error else None, aa.signed_error if aa else None
    return Quantile(
        captured_ms=getattr(captured.ttft, level).value_ms,
        forecast_ms=getattr(forecast.ttft, level).value_ms,
        error=signed,
        low=error.low if error else None,
        high=error.high if error else None,
        inside_band=error.inside_band if error else None,
        aa_error=aa_signed,
        inside_aa=None if signed is None or aa_signed is None else abs(signed) <= abs(aa_signed),
    )


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
        judge.fit([capture.load for capture in of_shape if capture.is_calibration])
        models[shape] = parameters(judge.model)
        for capture in of_shape:
            if capture.way in FORECAST_WAYS and not capture.is_calibration and judge.is_there(capture.load):
                cells += judge.judge(capture.load, capture.way)
    return Verdicts(cells=with_cold_yardsticks(cells), models=models)


def with_cold_yardsticks(cells: Sequence[Cell]) -> list[Cell]:
    """Cold loads that were measured in both ways, each the other's yardstick: they ask the same of the engine."""
    cold = {(cell.shape, cell.load, cell.cohort, cell.way): cell for cell in cells if cell.way in OTHER_COLD_WAY}
    found: list[Cell] = []
    for cell in cells:
        other = cold.get((cell.shape, cell.load, cell.cohort, OTHER_COLD_WAY.get(cell.way, "warm")))
        levels = {level: beside(one, other.quantiles[level]) for level, one in cell.quantiles.items()} if other else {}
        found.append(msgspec.structs.replace(cell, quantiles=cell.quantiles | levels))
    return found


def beside(one: Quantile, other: Quantile) -> Quantile:
    """A quantile with what another measurement of it gave as its yardstick."""
    if one.captured_ms is None or other.captured_ms is None or one.error is None:
        return one
    aa_error = (other.captured_ms - one.captured_ms) / one.captured_ms
    return msgspec.structs.replace(one, aa_error=aa_error, inside_aa=abs(one.error) <= abs(aa_error))


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
