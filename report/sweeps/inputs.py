"""Runs of a sweep, read, measured and held to be of one sweep: folders with an index, traces with a label each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from measure.metrics.results import TraceMetrics
from measure.metrics.slos import Slo, slos_of
from measure.metrics.trace import measure_run, read_run
from measure.sweepindex import INDEX, SweepRun, read_sweep
from report.sweeps.samples import Sample, sample_of
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta

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
        asked = slos_of(one.label, slos)
        metrics = measure_run(run, gpus=gpus, slos=asked)
        facts.append(facts_of(one.name, one.label, run.meta, metrics))
        differences = check_alike(facts, mixed=mixed)
        overview = metrics.overview
        told = one.parallel is not None or one.rate is not None
        rate = one.rate if told else overview.rate
        parallel = one.parallel if told else None if rate is not None else overview.concurrency
        found.runs.append(SweptRun(one.name, one.label, parallel, rate, one.repeat, metrics, sample_of(run)))
        found.notes += [*differences, *(f"{one.name}: {warning}" for warning in run.warnings)]


OF_WORKLOAD: Final = (
    *("api", "dataset", "prefix_count", "prefix_tokens", "prompt_tokens", "output_tokens", "turns", "min_turns"),
    *("max_turns", "think_s", "tool_latency_s", "first_turn_tokens", "subsequent_turn_tokens", "group_size"),
)
"""Keys of the header's ``workload`` that shape its requests; the others say how many there are, and when."""
LENGTH_FACTOR: Final = 2.0
"""Mean prompts this far apart are of different workloads, where headers do not tell."""
SAME_LABEL: Final = "a label is one configuration: give this run a label of its own, or --mixed"
SAME_WORKLOAD: Final = "give it as WORKLOAD/LABEL to keep it apart, or --mixed to compare all the same"


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a run that the runs beside it must share, by field; null: not told."""

    name: str
    label: str
    of_workload: dict[str, Any]
    of_label: dict[str, Any]
    prompt_tokens: float | None
    """Mean prompt."""
    tells_workload: bool


def facts_of(name: str, label: str, meta: Meta, metrics: TraceMetrics) -> Facts:
    shape, engine, workload = _shape(meta), meta.engine, meta.workload
    prompts = metrics.per_request["input_tokens"]
    settings: dict[str, Any] = {} if engine is None else {"name": engine.name, "version": engine.version}
    if engine is not None:
        settings |= {"block_size": engine.block_size, "enable_prefix_caching": engine.enable_prefix_caching}
    return Facts(
        name=name,
        label=label,
        of_workload={"model": meta.model, "source": _kind(meta), **shape},
        of_label={
            **{f"engine.{name}": value for name, value in settings.items()},
            "workload.cold_prompts": bool(workload and workload.cold_prompts),
        },
        prompt_tokens=None if prompts is None else prompts.mean,
        tells_workload=bool(shape),
    )


def _kind(meta: Meta) -> str | None:
    return None if meta.source is None else "a simulation" if meta.source == "sim" else "a measurement"


def _shape(meta: Meta) -> dict[str, Any]:
    told = {} if meta.workload is None else meta.workload.extra
    return {f"workload.{name}": told[name] for name in OF_WORKLOAD if name in told}


def check_alike(runs: Sequence[Facts], *, mixed: bool) -> list[str]:
    """Hold the last run to the first of its workload and the first of its label.

    Returns the differences, one each field, if they are allowed; raises InputError naming the first one otherwise.
    """
    last = runs[-1]
    workload = last.label.rpartition("/")[0]
    beside = next(run for run in runs if run.label.rpartition("/")[0] == workload)
    alike = next(run for run in runs if run.label == last.label)
    found = [(one, SAME_WORKLOAD) for one in _differences(last, beside, last.of_workload, beside.of_workload)]
    found += [(one, SAME_LABEL) for one in _differences(last, alike, last.of_label, alike.of_label)]
    found += [(one, SAME_WORKLOAD) for one in _lengths(last, beside)]
    if found and not mixed:
        raise InputError("; ".join(found[0]))
    return [difference for difference, _ in found]


def _differences(run: Facts, other: Facts, mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [
        f"{run.name} differs from {other.name} in {name}: {value}, there {theirs[name]}"
        for name, value in mine.items()
        if None not in (value, theirs.get(name)) and value != theirs[name]
    ]


def _lengths(run: Facts, other: Facts) -> list[str]:
    mine, theirs = run.prompt_tokens, other.prompt_tokens
    if (run.tells_workload and other.tells_workload) or not mine or not theirs:
        return []
    if 1 / LENGTH_FACTOR <= mine / theirs <= LENGTH_FACTOR:
        return []
    return [
        f"{run.name} differs from {other.name} in its workload: mean prompt {mine:,.0f} tokens, there {theirs:,.0f}"
    ]
