"""Runs of a sweep, read and measured: from folders with an index, and from traces with a label each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from measure.metrics.results import TraceMetrics
from measure.metrics.slos import Slo
from measure.metrics.trace import measure_run, read_run
from measure.sweepindex import INDEX, SweepRun, read_sweep
from report.sweeps.mixed import Facts, check_alike, facts_of
from report.sweeps.samples import Sample, sample_of
from tracefile.records.errors import InputError

LONGEST_LABEL: Final = 60


@dataclass(frozen=True, slots=True)
class Planned:
    """A trace to read, with what is told of it beside the trace."""

    name: str
    label: str
    path: Path
    parallel: int | None = None
    """Null: told by the trace, if at all; so with ``rate``."""
    rate: float | None = None
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class SweptRun:
    """A run and its metrics."""

    name: str
    label: str
    parallel: int | None
    rate: float | None
    repeat: int
    metrics: TraceMetrics
    sample: Sample

    @property
    def workload(self) -> str:
        return self.label.rpartition("/")[0]

    @property
    def in_flight(self) -> float:
        """Mean number of requests in flight."""
        found = self.metrics.workload.concurrency
        return found.mean if found is not None else 0.0


@dataclass(slots=True)
class SweptRuns:
    """Runs with a place in the tables, and what is to be said of the others."""

    runs: list[SweptRun] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_runs(arguments: Sequence[str], left_out: list[str]) -> list[Planned]:
    """Return the traces of ``DIR`` and ``LABEL=TRACE``; failed and cut runs are put into ``left_out``."""
    found: list[Planned] = []
    for argument in arguments:
        folder = Path(argument)
        if folder.is_dir():
            found += _of_folder(folder, left_out)
        elif folder.name == INDEX:
            found += _of_folder(folder.parent, left_out)
        else:
            label, equals, path = argument.partition("=")
            if not (label.strip() and equals and path):
                raise InputError(f"{argument}: expected a folder with {INDEX}, or LABEL=TRACE")
            found.append(Planned(Path(path).name, _checked(label, argument), Path(path)))
    return found


def _of_folder(folder: Path, left_out: list[str]) -> Iterator[Planned]:
    for run in read_sweep(folder):
        if run.status == "done":
            label = _checked(run.label, f"{folder / INDEX}: {run.run}")
            yield Planned(run.run, label, folder / run.trace, run.parallel, run.rate, run.repeat)
        else:
            left_out.append(_reason(run))


def _reason(run: SweepRun) -> str:
    return f"{run.run}: {run.status}" + (f" ({run.reason})" if run.reason else "")


def _checked(label: str, where: str) -> str:
    if not label.isprintable() or len(label) > LONGEST_LABEL:
        raise InputError(
            f"{where}: label {label[:LONGEST_LABEL]!r}; expected at most {LONGEST_LABEL} printable characters"
        )
    return label


def read_runs(
    planned: Sequence[Planned], found: SweptRuns, *, slos: Sequence[Slo], gpus: int | None, mixed: bool
) -> None:
    """Read and measure every run into ``found``; raises InputError naming a run that is not like the others."""
    facts: list[Facts] = []
    for one in planned:
        run = read_run(one.path)
        if not run.ok.any():
            found.left_out.append(f"{one.name}: none of {len(run):,} requests completed")
            continue
        asked = [slo for slo in slos if slo.threshold.label in (None, one.label)]
        metrics = measure_run(run, gpus=gpus, slos=asked)
        facts.append(facts_of(one.name, one.label, run.meta, metrics))
        differences = check_alike(facts, mixed=mixed)
        overview = metrics.overview
        told = one.parallel is not None or one.rate is not None
        rate = one.rate if told else overview.rate
        parallel = one.parallel if told else None if rate is not None else overview.concurrency
        found.runs.append(SweptRun(one.name, one.label, parallel, rate, one.repeat, metrics, sample_of(run)))
        found.notes += [*differences, *(f"{one.name}: {warning}" for warning in run.warnings)]
