"""Runs of ``loadgen sweep`` as a grid of latency and throughput by label and load, beside the first label."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Final

import msgspec

from measure.cohorts import ALL
from measure.metrics.results import TraceMetrics
from measure.metrics.slos import slos_of
from measure.metrics.statistics import statistic
from measure.metrics.trace import measure_run, read_run
from measure.number_format import duration, factor, listed
from measure.quantiles import quantile
from measure.resampling import t_quantile
from measure.sweepindex import INDEX, read_sweep
from measure.thresholds import Threshold
from report.grid.points import LATENCY, PER_GPU, THROUGHPUT, Grid, Measure, Point, Span, pareto_set, workload_of
from tracefile.records.errors import InputError

COLUMNS: Final = (
    *(THROUGHPUT, PER_GPU, "ttft.all.p50", LATENCY, "interactivity", "hit_rate", "session_latency.p90"),
    *("tpot.p50", "goodput", "requests_per_s", "in_flight", "completed"),
)
COMPARED: Final = (THROUGHPUT, "ttft.all.p50", LATENCY, "interactivity")
"""Measures by which labels are compared."""
LOADS: Final = {"concurrency": "concurrency {:g}", "rate": "{:g} arrivals/s", "in flight": "{:.1f} requests in flight"}
"""Axes of the load, and their words."""


@dataclass(frozen=True, slots=True)
class SweptRun:
    """Run of a sweep with its latency and throughput."""

    name: str
    label: str
    parallel: int | None
    rate: float | None
    repeat: int
    metrics: TraceMetrics
    setup: Mapping[str, object]
    """Facts that the runs of a label share."""

    @property
    def workload(self) -> str:
        """Label before ``/``; labels are compared within a workload."""
        return self.label.rpartition("/")[0]


def read_grid(folders: Sequence[Path], slos: Sequence[Threshold], gpus: int | None) -> Grid:
    """Read and measure the runs of the folders; raises InputError if no run is done."""
    runs: list[SweptRun] = []
    notes: list[str] = []
    for folder in folders:
        for entry in read_sweep(folder):
            if entry.status != "done":
                reason = f" ({entry.reason})" if entry.reason else ""
                notes.append(f"left out: {entry.run}: {entry.status}{reason}")
                continue
            run = read_run(folder / entry.trace)
            if not run.ok.any():
                notes.append(f"left out: {entry.run}: none of {len(run):,} requests completed")
                continue
            metrics = measure_run(run, gpus=gpus, slos=slos_of(entry.label, slos))
            engine = run.meta.engine
            setup = {"model": run.meta.model, "engine": None if engine is None else f"{engine.name} {engine.version}"}
            runs.append(SweptRun(entry.run, entry.label, entry.parallel, entry.rate, entry.repeat, metrics, setup))
            notes += [f"{entry.run}: {warning}" for warning in run.warnings]
    if not runs:
        raise InputError(
            f"{folders[0] / INDEX}: no run is done; expected at least one" + "".join(f"; {note}" for note in notes)
        )
    return make_grid(", ".join(map(str, folders)), runs, [*notes, *_mixed(runs)])


def labels_in(folders: Sequence[Path]) -> list[str]:
    return list(dict.fromkeys(entry.label for folder in folders for entry in read_sweep(folder)))


def _mixed(runs: Sequence[SweptRun]) -> Iterator[str]:
    """Yield a note on labels whose runs have several models or engines."""
    for label in dict.fromkeys(run.label for run in runs):
        for name in ("model", "engine"):
            values = dict.fromkeys(str(run.setup[name]) for run in runs if run.label == label and run.setup[name])
            if len(values) > 1:
                yield f"{label}: runs of several {name}s, {listed(list(values))}: a label is one configuration"


def make_grid(source: str, runs: Sequence[SweptRun], notes: Sequence[str]) -> Grid:
    kind = (
        "concurrency" if all(run.parallel for run in runs) else "rate" if all(run.rate for run in runs) else "in flight"
    )
    repeats: dict[tuple[str, float], list[SweptRun]] = {}
    for run in sorted(runs, key=lambda run: run.repeat):
        repeats.setdefault((run.label, _load(run, kind)), []).append(run)
    firsts: dict[str, str] = {}
    for run in runs:
        firsts.setdefault(run.workload, run.label)
    order = {label: number for number, label in enumerate(dict.fromkeys(run.label for run in runs))}
    workloads = list(firsts)
    points = [
        _point(label, load, kind, group, repeats.get((firsts[group[0].workload], load), []))
        for (label, load), group in sorted(
            repeats.items(), key=lambda item: (workloads.index(item[1][0].workload), order[item[0][0]], item[0][1])
        )
    ]
    points = _marked(points)
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(str(point.settings["label"]), []).append(point)
    grid = Grid(
        source=source,
        headlines=[],
        notes=list(notes),
        axes=["label", kind],
        throughput=THROUGHPUT,
        columns=list(COLUMNS),
        points=points,
    )
    sentences = [*_sentences(lines, firsts, kind), *_slo_sentences(lines, runs, kind)]
    return msgspec.structs.replace(grid, headlines=sentences)


def _load(run: SweptRun, kind: str) -> float:
    if kind == "in flight":
        concurrency = run.metrics.workload.concurrency
        return round(concurrency.mean, 1) if concurrency is not None else 0.0
    return float((run.parallel if kind == "concurrency" else run.rate) or 0.0)


def values_of(metrics: TraceMetrics, *, even: bool) -> dict[str, float | None]:
    """Return latency, throughput and hit rate of a run; ``even``: a constant load, with steady throughput."""
    tokens, flight, goodput = metrics.workload.completion_tps, metrics.workload.concurrency, metrics.workload.goodput
    throughput, gpus = tokens.steady if even else tokens.overall, metrics.workload.gpus
    return {
        "completed": metrics.requests.success,
        "in_flight": None if flight is None else flight.mean,
        "requests_per_s": metrics.workload.requests_per_s,
        THROUGHPUT: throughput,
        PER_GPU: throughput / gpus if throughput is not None and gpus else None,
        "interactivity": statistic(metrics.per_request["interactivity_tps"], "p50"),
        "ttft.all.p50": statistic(metrics.per_request["ttft_ms"], "p50"),
        LATENCY: statistic(metrics.per_request["ttft_ms"], "p90"),
        "tpot.p50": statistic(metrics.per_request["tpot_ms"], "p50"),
        "session_latency.p90": statistic(metrics.per_session["latency_ms"], "p90"),
        "hit_rate": metrics.hits.reported[ALL].rate,
        "goodput": None if goodput is None else goodput.requests_per_s,
    }


def _point(label: str, load: float, kind: str, runs: Sequence[SweptRun], base: Sequence[SweptRun]) -> Point:
    even = kind == "concurrency"
    local, reference = ([values_of(run.metrics, even=even) for run in side] for side in (runs, base))
    measures = {}
    for name in COLUMNS:
        values = _complete_values(local, name)
        if values:
            ratio = (
                ratio_of(values, _complete_values(reference, name))
                if name in COMPARED and base and base[0].label != label
                else None
            )
            measures[name] = Measure(value=_range(values), ratio=ratio)
    slos = [slo for run in runs for slo in run.metrics.slos]
    return Point(
        name=f"{label} at {LOADS[kind].format(load)}",
        settings={"label": label, kind: load},
        measures=measures,
        meets=all(slo.met for slo in slos) if slos else None,
    )


def _complete_values(values: Sequence[Mapping[str, float | None]], name: str) -> list[float]:
    complete = [value for measures in values if (value := measures[name]) is not None]
    return complete if len(complete) == len(values) else []


def _range(values: Sequence[float]) -> Span:
    ordered = sorted(values)
    several = len(ordered) > 1
    return Span(
        middle=quantile(ordered, 0.5), low=ordered[0] if several else None, high=ordered[-1] if several else None
    )


def ratio_of(ours: Sequence[float], reference: Sequence[float]) -> Span | None:
    """Return the ratio of medians with the t interval of the geometric means, repeat by repeat (latency, throughput).

    No interval with one repeat on a side. None: a value is missing or zero.
    """
    if not ours or not reference or min(*ours, *reference) <= 0.0:
        return None
    value = quantile(sorted(ours), 0.5) / quantile(sorted(reference), 0.5)
    if min(len(ours), len(reference)) < 2:
        return Span(middle=value)
    apart = [log(our / their) for our, their in zip(ours, reference, strict=False)]
    reach = t_quantile(len(apart) - 1) * stdev(apart) / sqrt(len(apart))
    return Span(middle=value, low=exp(mean(apart) - reach), high=exp(mean(apart) + reach))


def _marked(points: Sequence[Point]) -> list[Point]:
    """Mark the Pareto set of latency and throughput of each workload."""
    by_workload: dict[str, list[tuple[int, float, float]]] = {}
    for index, point in enumerate(points):
        x, y = point.middle(THROUGHPUT), point.middle(LATENCY)
        if x is not None and y is not None:
            by_workload.setdefault(workload_of(point), []).append((index, x, -y))
    efficient = {
        index
        for group in by_workload.values()
        for (index, *_), is_efficient in zip(group, pareto_set([(x, y) for _, x, y in group]), strict=True)
        if is_efficient
    }
    return [
        msgspec.structs.replace(point, marks=["pareto"]) if index in efficient else point
        for index, point in enumerate(points)
    ]


def _sentences(lines: Mapping[str, Sequence[Point]], firsts: Mapping[str, str], kind: str) -> Iterator[str]:
    """Yield a sentence on throughput and latency per label, compared with its workload's first label."""
    for label, points in lines.items():
        first = firsts[workload_of(points[0])]
        compared = [
            point for point in points if LATENCY in point.measures and point.measures[LATENCY].ratio is not None
        ]
        if label != first and compared:
            yield _beside(compared[-1], lines[first], first, kind)
        elif label != first:
            yield f"{label} and {first} share no load: they are not compared"
        elif all(other == label or workload_of(group[0]) != workload_of(points[0]) for other, group in lines.items()):
            best = max(points, key=lambda point: point.middle(THROUGHPUT) or 0.0)
            tokens = best.middle(THROUGHPUT)
            text = (
                "reports no output tokens"
                if tokens is None
                else f"gives at most {factor(tokens)} output tokens per second"
            )
            yield f"{label} {text}, at {LOADS[kind].format(best.settings[kind])}"


def _beside(point: Point, reference: Sequence[Point], first: str, kind: str) -> str:
    """Compare throughput and latency with the first label, at the largest common load."""
    other = next(candidate for candidate in reference if candidate.settings[kind] == point.settings[kind])
    workload, _, label = str(point.settings["label"]).rpartition("/")
    base, at = first.rpartition("/")[2], LOADS[kind].format(point.settings[kind])
    tokens, wait = (point.measures[name].ratio if name in point.measures else None for name in (THROUGHPUT, LATENCY))
    gives = "" if tokens is None else f"{label} gives {_times(tokens)} {base}'s output tokens per second, and "
    waits = " against ".join(duration(side.middle(LATENCY) or 0.0) for side in (point, other))
    where = f"{workload}, at {at}, " if workload else f"At {at} "
    return f"{where}{gives}its TTFT p90 is {_times(wait)} {base}'s: {waits}"


def _times(ratio: Span | None) -> str:
    if ratio is None or ratio.middle is None:
        return "not known beside"
    interval = "" if ratio.low is None or ratio.high is None else f" ({factor(ratio.low)} to {factor(ratio.high)})"
    return f"{factor(ratio.middle)} ×{interval}"


def _slo_sentences(lines: Mapping[str, Sequence[Point]], runs: Sequence[SweptRun], kind: str) -> Iterator[str]:
    """Yield the largest load of each label at which all latency SLOs are met."""
    for label, points in lines.items():
        slos = next(run.metrics.slos for run in runs if run.label == label)
        if slos:
            missed = next((number for number, point in enumerate(points) if not point.meets), len(points))
            largest = "at no load" if missed == 0 else f"up to {LOADS[kind].format(points[missed - 1].settings[kind])}"
            largest = "at every load" if missed == len(points) else largest
            yield f"{listed([slo.slo for slo in slos])}: met with {label} {largest}"
