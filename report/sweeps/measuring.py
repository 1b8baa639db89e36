"""A sweep measured: its runs read and compared, by workload, line and load."""

from collections.abc import Sequence
from dataclasses import dataclass

from measure.metrics.slos import Slo
from measure.resampling import CONFIDENCE
from report.sweeps.contrasts import Side, contrast
from report.sweeps.inputs import Planned, SweptRun, SweptRuns, read_runs
from report.sweeps.points import line_of, load_kind, load_of
from report.sweeps.results import Sweep, Workload
from report.sweeps.verdict import verdict
from tracefile.records.errors import InputError


@dataclass(frozen=True, slots=True)
class Question:
    """Settings of ``report sweep``."""

    slos: tuple[Slo, ...] = ()
    gpus: int | None = None
    mixed: bool = False
    """Let runs differ, and say so."""
    draws: int = 200
    seed: int = 0


def measure_sweep(planned: Sequence[Planned], left_out: Sequence[str], question: Question) -> Sweep:
    """Read and compare every run; raises InputError if none is left, or if they are not of one sweep."""
    found = SweptRuns(left_out=list(left_out))
    read_runs(planned, found, slos=question.slos, gpus=question.gpus, mixed=question.mixed)
    if not found.runs:
        said = f": {'; '.join(found.left_out)}" if found.left_out else ""
        raise InputError(f"no run is left to report{said}; expected at least one that is done")
    names = dict.fromkeys(run.workload for run in found.runs)
    workloads = [_workload(name, [run for run in found.runs if run.workload == name], question) for name in names]
    return Sweep(
        confidence=CONFIDENCE,
        seed=question.seed,
        draws=question.draws,
        workloads=workloads,
        left_out=found.left_out,
        notes=found.notes,
    )


def _workload(name: str, runs: Sequence[SweptRun], question: Question) -> Workload:
    kind = load_kind(runs, mixed=question.mixed)
    repeats: dict[str, dict[float, list[SweptRun]]] = {}
    for run in sorted(runs, key=lambda run: run.repeat):
        repeats.setdefault(run.label, {}).setdefault(load_of(run, kind), []).append(run)
    repeats = {label: repeats[label] for label in dict.fromkeys(run.label for run in runs)}
    lines = [line_of(label, by_load, kind, question.slos) for label, by_load in repeats.items()]
    base, *others = (Side(label, by_load) for label, by_load in repeats.items())
    contrasts = [contrast(side, base, kind, question.draws, question.seed) for side in others]
    found = Workload(name=name, load=kind, lines=lines, contrasts=contrasts, verdict=[])
    return Workload(name=name, load=kind, lines=lines, contrasts=contrasts, verdict=verdict(found))
