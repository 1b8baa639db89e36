"""Points of a sweep: a label at one load, its repeats as median and range, its SLOs, its place in the Pareto sets."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from measure.cohorts import ALL
from measure.metrics.results import Goodput, SloResult, TraceMetrics
from measure.metrics.slos import Slo, slos_of
from measure.metrics.statistics import statistic
from measure.quantiles import quantile
from report.sweeps.inputs import SweptRun
from report.sweeps.pareto import pareto_set
from report.sweeps.results import Line, LoadKind, Point, Value
from tracefile.records.errors import InputError

Repeats = Mapping[float, Sequence[SweptRun]]
"""Runs of a label by load."""


def _good(found: Goodput | None, name: str) -> float | None:
    return None if found is None else getattr(found, name)


VALUES: Final[Mapping[str, Callable[[TraceMetrics], float | None]]] = {
    "requests": lambda run: run.overview.n,
    "rps": lambda run: run.overview.rps,
    "gen_tps": lambda run: run.overview.gen_tps,
    "success": lambda run: run.overview.success,
    "in_flight": lambda run: None if run.workload.concurrency is None else run.workload.concurrency.mean,
    "ttft_p50_ms": lambda run: statistic(run.per_request["ttft_ms"], "p50"),
    "ttft_p90_ms": lambda run: statistic(run.per_request["ttft_ms"], "p90"),
    "tpot_p50_ms": lambda run: statistic(run.per_request["tpot_ms"], "p50"),
    "interactivity_tps": lambda run: statistic(run.per_request["interactivity_tps"], "p50"),
    "session_latency_p90_ms": lambda run: statistic(run.per_session["latency_ms"], "p90"),
    "hit_rate": lambda run: run.hits.reported[ALL].rate,
    "eligible_hit_rate": lambda run: statistic(run.per_session["eligible_hit_rate"], "mean"),
    "goodput_share": lambda run: _good(run.workload.goodput, "share"),
    "goodput_per_s": lambda run: _good(run.workload.goodput, "requests_per_s"),
}
"""Metrics of a run that every point has."""


def values_of(run: TraceMetrics, kind: LoadKind) -> dict[str, float | None]:
    """Return the metrics of a run; its throughput is that of the steady state if a limit keeps the load even."""
    tokens = run.workload.completion_tps
    throughput = tokens.steady if kind == "parallel" else tokens.overall
    gpus = run.workload.gpus
    return {
        **{name: value_of(run) for name, value_of in VALUES.items()},
        "throughput_tps": throughput,
        "throughput_tps_per_gpu": throughput / gpus if throughput is not None and gpus else None,
    }


def load_kind(runs: Sequence[SweptRun], *, mixed: bool) -> LoadKind:
    """Return the quantity by which the runs of a workload differ; raises InputError for rates beside limits."""
    rated = next((run for run in runs if run.rate is not None), None)
    limited = next((run for run in runs if run.parallel is not None), None)
    if rated is not None and limited is not None and not mixed:
        raise InputError(
            f"{rated.name} has rate {rated.rate:g}, {limited.name} concurrency {limited.parallel}; expected one of "
            "them in all runs: give it as WORKLOAD/LABEL, or --mixed to compare by requests in flight"
        )
    if all(run.parallel is not None for run in runs):
        return "parallel"
    return "rate" if all(run.rate is not None for run in runs) else "in_flight"


def load_of(run: SweptRun, kind: LoadKind) -> float:
    told = {"parallel": run.parallel, "rate": run.rate}.get(kind)
    return run.in_flight if told is None else float(told)


def line_of(label: str, repeats: Repeats, kind: LoadKind, slos: Sequence[Slo]) -> Line:
    """Return a label's points."""
    asked = slos_of(label, slos)
    points = [_point(load, repeats[load], kind, asked) for load in sorted(repeats)]
    on = {name: _pareto(points, name, sign) for name, sign in AXES.values()}
    marked = [
        msgspec.structs.replace(point, pareto=[axis for axis, (name, _) in AXES.items() if at in on[name]])
        for at, point in enumerate(points)
    ]
    return Line(label=label, points=marked, largest_load=_largest_load(points))


AXES: Final = {"interactivity": ("interactivity_tps", 1.0), "latency": ("session_latency_p90_ms", -1.0)}
"""Metric beside throughput in each Pareto set, and its sign: a short latency is the better one."""


def _pareto(points: Sequence[Point], name: str, sign: float) -> set[int]:
    """Return places of the points that no other dominates; a point without both values has none."""
    found = {at: (point.median(name), point.median("throughput_tps")) for at, point in enumerate(points)}
    known = {at: (sign * x, y) for at, (x, y) in found.items() if x is not None and y is not None}
    return {at for at, kept in zip(known, pareto_set(list(known.values())), strict=True) if kept}


def _point(load: float, runs: Sequence[SweptRun], kind: LoadKind, slos: Sequence[Slo]) -> Point:
    found = [values_of(run.metrics, kind) for run in runs]
    return Point(
        load=load,
        runs=[run.name for run in runs],
        values={name: _value([values[name] for values in found]) for name in found[0]},
        slos=[_slo(slo, [run.metrics.slos[at] for run in runs]) for at, slo in enumerate(slos)],
        pareto=[],
    )


def _value(found: Sequence[float | None]) -> Value | None:
    known = sorted(one for one in found if one is not None)
    return Value(quantile(known, 0.5), known[0], known[-1]) if known and len(known) == len(found) else None


def _slo(slo: Slo, found: Sequence[SloResult]) -> SloResult:
    value = quantile(sorted(one.value for one in found), 0.5)
    return msgspec.structs.replace(found[0], value=value, met=slo.threshold.holds(value), n=sum(one.n for one in found))


def _largest_load(points: Sequence[Point]) -> float | None:
    largest: float | None = None
    for point in points:
        if not point.slos or not point.meets:
            break
        largest = point.load
    return largest
