"""``report sweep``: the points of a sweep side by side, as tables and a page."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from measure.metrics.flags import add_gpus_argument, add_slo_arguments, checked_gpus
from measure.metrics.slos import Slo, parse_slos
from measure.resampling import CONFIDENCE
from report.output import add_picture_arguments, pictures_of
from report.sweeps.contrasts import Side, contrast
from report.sweeps.inputs import Planned, SweptRun, SweptRuns, plan_runs, read_runs
from report.sweeps.points import line_of, load_kind, load_of
from report.sweeps.results import Sweep, Workload
from report.sweeps.terminal import sweep_lines
from report.sweeps.verdict import verdict
from tracefile.commandline.printing import print_result
from tracefile.records.errors import InputError

EPILOG: Final = """\
A folder holds sweep.jsonl, as loadgen sweep writes it. Labels are compared with the first one. A label WORKLOAD/NAME
is compared within its workload alone. Every number is defined in docs/metrics.md. Exit codes: 0 done, 1 no load of a
label meets the SLOs, 2 bad input.

examples:
  report sweep nightly/ --html sweep.html --slo 'ttft.p90<=500ms'
  report sweep A=a-p8.jsonl.zst A=a-p16.jsonl.zst B=b-p8.jsonl.zst B=b-p16.jsonl.zst --gpus 8
"""


@dataclass(frozen=True, slots=True)
class Question:
    """Settings of ``report sweep``."""

    slos: tuple[Slo, ...] = ()
    gpus: int | None = None
    mixed: bool = False
    """Let runs differ, and say so."""
    draws: int = 200
    seed: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="DIR|LABEL=TRACE",
        help="folder of a sweep; or a trace, several of a label are its line",
    )
    add_picture_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; tables go to stderr")
    add_gpus_argument(parser)
    add_slo_arguments(parser, "[LABEL.]")
    parser.add_argument("--mixed", action="store_true", help="compare runs of other models, engines or workloads too")
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap")
    parser.add_argument("--bootstrap", type=int, default=200, help="draws for intervals")


def run(flags: argparse.Namespace) -> int:
    """Print a sweep; 1 if no load of a label meets the SLOs."""
    if flags.bootstrap < 0:
        raise InputError(f"--bootstrap {flags.bootstrap}: expected 0 or more draws")
    left_out: list[str] = []
    planned = plan_runs(flags.runs, left_out)
    pictures = pictures_of(flags, [run.path for run in planned if run.path.exists()])
    slos = parse_slos(flags.slo, flags.slo_file, list(dict.fromkeys(run.label for run in planned)))
    question = Question(slos, checked_gpus(flags.gpus), flags.mixed, flags.bootstrap, flags.seed)
    sweep = measure_sweep(planned, left_out, question)
    if pictures.wanted:
        # The page's libraries take half a second to import: only who wants a page waits for them.
        from report.sweeps.page import draw_sweep, render_sweep  # noqa: PLC0415

        drawn = draw_sweep(sweep)
        pictures.write(render_sweep(sweep, drawn), drawn.figures)
    print_result(sweep, sweep_lines(sweep), as_json=flags.json)
    return 0 if _slos_are_met(sweep) else 1


def _slos_are_met(sweep: Sweep) -> bool:
    lines = [line for found in sweep.workloads for line in found.lines]
    return all(any(point.meets for point in line.points) for line in lines)


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
