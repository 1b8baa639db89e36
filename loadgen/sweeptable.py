"""Lines of a sweep: its plan, its progress, and the table at its end."""

from collections.abc import Sequence
from typing import Final

import msgspec

from loadgen.sweepplan import PlannedRun, SweepPlan, WarmUp
from measure.cohorts import ALL
from measure.metrics.results import TraceMetrics
from measure.metrics.statistics import statistic
from measure.metrics.tables import value_text
from measure.sweepindex import RunStatus, SweepRun
from measure.table import table_lines
from measure.wording import NOTHING, share

BETWEEN: Final = {
    "auto": "an idle engine, and its cache reset (other tokens where it has no reset)",
    "reset": "an idle engine, and its cache reset",
    "cold": "an idle engine, and tokens that no run before has sent",
    "keep": "an idle engine, its cache as it is",
}


class SweepRow(msgspec.Struct, frozen=True, kw_only=True):
    """Run in the table; null: not known."""

    run: str
    label: str
    parallel: int | None
    rate: float | None
    repeat: int
    status: RunStatus
    reason: str | None
    requests: int | None = None
    completed: int | None = None
    completion_tps: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p90_ms: float | None = None
    interactivity_p50_tps: float | None = None
    hit_rate: float | None = None
    """Σ cached / Σ prompt tokens, as the engine reports them."""
    slos_met: bool | None = None
    """Null: none was asked for."""


class SweepSummary(msgspec.Struct, frozen=True):
    """Content of ``--json``."""

    folder: str
    planned: int
    done: int
    failed: int
    command: str
    runs: list[SweepRow]


def row_of(entry: SweepRun, metrics: TraceMetrics | None) -> SweepRow:
    """Return the run's row; no metrics: it is not done."""
    told = {name: getattr(entry, name) for name in ("run", "label", "parallel", "rate", "repeat", "status", "reason")}
    if metrics is None:
        return SweepRow(**told)
    ttft, speed = metrics.per_request["ttft_ms"], metrics.per_request["interactivity_tps"]
    hits = metrics.hits.reported.get(ALL)
    return SweepRow(
        **told,
        requests=metrics.requests.n,
        completed=metrics.requests.completed,
        completion_tps=metrics.workload.completion_tps.overall,
        ttft_p50_ms=statistic(ttft, "p50"),
        ttft_p90_ms=statistic(ttft, "p90"),
        interactivity_p50_tps=statistic(speed, "p50"),
        hit_rate=None if hits is None else hits.rate,
        slos_met=all(slo.met for slo in metrics.slos) if metrics.slos else None,
    )


def summary_table(rows: Sequence[SweepRow]) -> list[str]:
    """Return the table by point, with labels side by side, and a line for each run that is not done."""
    by_rate = any(row.rate is not None for row in rows)
    judged = any(row.slos_met is not None for row in rows)
    headings = ["label", "rate" if by_rate else "parallel", "repeat", "requests", "completed", "tok/s"]
    headings += ["TTFT p50 ms", "p90 ms", "interactivity", "hit rate", *(["SLOs"] if judged else [])]
    done = [row for row in rows if row.status == "done"]
    done.sort(key=lambda row: (row.rate or row.parallel or 0, row.label, row.repeat))
    cells = [[*_cells(row), *([_met(row)] if judged else [])] for row in done]
    undone = [f"{row.run}: {row.status.upper()}: {row.reason}" for row in rows if row.status != "done"]
    return [*(table_lines(headings, cells, "<") if cells else []), *undone]


def _cells(row: SweepRow) -> list[str]:
    point = f"{row.rate:g}" if row.rate is not None else f"{row.parallel}"
    return [
        *(row.label, point, f"{row.repeat}", f"{row.requests:,}", f"{row.completed:,}"),
        _value("completion_tps", row.completion_tps),
        *(_value("ttft_ms", value) for value in (row.ttft_p50_ms, row.ttft_p90_ms)),
        _value("interactivity_tps", row.interactivity_p50_tps),
        share(row.hit_rate),
    ]


def _value(name: str, value: float | None) -> str:
    return NOTHING if value is None else value_text(name, value)


def _met(row: SweepRow) -> str:
    return NOTHING if row.slos_met is None else "met" if row.slos_met else "MISSED"


def result_line(row: SweepRow, seconds: float) -> str:
    """Return what the run gave, for its end."""
    if row.status != "done":
        return f"  {row.status.upper()}: {row.reason}"
    ttft = f"TTFT p50 {_value('ttft_ms', row.ttft_p50_ms)}, p90 {_value('ttft_ms', row.ttft_p90_ms)} ms"
    slos = "" if row.slos_met is None else f"; SLOs {_met(row)}"
    return (
        f"  {row.completed:,} of {row.requests:,} requests in {seconds:.1f} s; "
        f"{_value('completion_tps', row.completion_tps)} tok/s; {ttft}; hit rate {share(row.hit_rate)}{slos}"
    )


def plan_lines(plan: SweepPlan) -> list[str]:
    """Return the runs in their order, and the time that they take."""
    rows = [[f"{number}", run.name, run.words(), run.config.url] for number, run in enumerate(plan.runs, 1)]
    before = f"before each run: {warm_up_words(plan.warm_up)}, {BETWEEN[plan.cache]}"
    return [*table_lines(["#", "run", "point", "url"], rows, "><<<"), before, *_time(plan.runs)]


def _time(runs: Sequence[PlannedRun]) -> list[str]:
    ends_s = [run.config.ends_s for run in runs]
    known = [end_s for end_s in ends_s if end_s is not None]
    if len(known) < len(ends_s):
        return [f"{len(runs)} runs; time unknown without --duration"]
    return [f"{len(runs)} runs of {about(known[0])}: about {about(sum(known))}, and their warm-ups and last responses"]


def warm_up_words(warm_up: WarmUp) -> str:
    if warm_up.requests is not None:
        return f"a warm-up of {warm_up.requests} requests"
    return "no warm-up" if warm_up.seconds is None else f"a warm-up of {warm_up.seconds:g} s"


def about(seconds: float) -> str:
    """Return a long time in one unit: 45 s, 8 min, 1.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
