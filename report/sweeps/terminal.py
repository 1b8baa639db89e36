"""A sweep as tables for a terminal, and the same cells for the page."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from measure.metrics.tables import value_text
from measure.table import TextTable
from measure.wording import NOTHING, factor, share
from report.sweeps.results import LOAD_TITLES, Contrast, Point, Sweep, Value, Workload
from report.sweeps.verdict import headlines, short

Column = tuple[str, str]
"""Heading and metric."""
OVERVIEW: Final[tuple[Column, ...]] = (
    *(("Num", "requests"), ("RPS", "rps"), ("Gen/s", "gen_tps"), ("Success", "success")),
    *(("steady tok/s", "throughput_tps"), ("tok/s/GPU", "throughput_tps_per_gpu"), ("in flight", "in_flight")),
    *(("hit rate", "hit_rate"), ("eligible", "eligible_hit_rate")),
)
LATENCY: Final[tuple[Column, ...]] = (
    *(("TTFT p50 ms", "ttft_p50_ms"), ("TTFT p90 ms", "ttft_p90_ms"), ("TPOT p50 ms", "tpot_p50_ms")),
    *(("tok/s/user", "interactivity_tps"), ("session p90 ms", "session_latency_p90_ms")),
    *(("goodput", "goodput_share"), ("good RPS", "goodput_per_s")),
)
RATIO_TITLES: Final = {
    "throughput_tps": "tok/s",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p90_ms": "TTFT p90",
    "interactivity_tps": "tok/s/user",
    "session_latency_p90_ms": "session p90",
}
MARKS: Final = {"interactivity": "i", "latency": "l"}


def sweep_lines(sweep: Sweep) -> Iterator[str]:
    """Yield the verdict, runs left out and notes, then each workload's tables."""
    yield from headlines(sweep)
    yield from (f"left out: {reason}" for reason in sweep.left_out)
    yield from (f"note: {note}" for note in sweep.notes)
    for found in sweep.workloads:
        yield from ("", *([found.name, *found.verdict] if found.name else []))
        yield from overview_table(found).lines
        for table in (latency_table(found), *(contrast_table(found, pair) for pair in found.contrasts if pair.points)):
            yield from ("", *table.lines)


def overview_table(found: Workload) -> TextTable:
    """Return evalscope's row of each point with throughput and hits."""

    def limits(point: Point) -> list[str]:
        return [found.number(point.load) if found.load == kind else NOTHING for kind in ("parallel", "rate")]

    return _points_table(found, ["Conc", "Rate"], limits, OVERVIEW)


def latency_table(found: Workload) -> TextTable:
    """Return latencies, goodput, SLOs and Pareto sets of each point."""
    judged = any(point.slos for line in found.lines for point in line.points)

    def ends(point: Point) -> list[str]:
        met = [("met" if point.meets else "missed") if point.slos else NOTHING] if judged else []
        return [*met, " ".join(MARKS[axis] for axis in point.pareto) or NOTHING]

    title = [LOAD_TITLES[found.load]]
    table = _points_table(found, title, lambda point: [found.number(point.load)], LATENCY, ends)
    return TextTable([*table.columns, *(["SLOs"] if judged else []), "Pareto"], table.rows)


def _points_table(
    found: Workload,
    loads: list[str],
    limits: Callable[[Point], list[str]],
    columns: Sequence[Column],
    ends: Callable[[Point], list[str]] = lambda _: [],
) -> TextTable:
    """Return a row for each point, without columns that no point tells; a further one has the repeats' range."""
    points = [(short(line.label), point) for line in found.lines for point in line.points]
    told = [name for _, name in columns if any(point.values[name] is not None for _, point in points)]
    if found.load != "parallel":  # the same as Gen/s
        told = [name for name in told if name != "throughput_tps"]
    rows: list[list[str]] = []
    for label, point in points:
        rows.append([label, *limits(point), *(_cell(name, point.values[name]) for name in told), *ends(point)])
        if len(point.runs) > 1:
            ranges = [_range(name, point.values[name]) for name in told]
            rows.append([f"  {len(point.runs)} repeats", *("" for _ in loads), *ranges, *("" for _ in ends(point))])
    return TextTable(["label", *loads, *(heading for heading, name in columns if name in told)], rows)


def _cell(name: str, value: Value | None) -> str:
    return NOTHING if value is None else _text(name, value.median)


def _range(name: str, value: Value | None) -> str:
    """Return smallest and largest of the repeats; empty if they are equal as shown."""
    low, high = ("", "") if value is None else (_text(name, value.low), _text(name, value.high))
    return "" if low == high else f"{low}–{high}"


def _text(name: str, value: float) -> str:
    return share(value) if name in ("success", "goodput_share") else value_text(name, value)


def contrast_table(found: Workload, pair: Contrast) -> TextTable:
    """Return ratios at each common load; the heading of the loads says of which labels."""
    heading = f"{short(pair.label)} / {short(pair.against)}, {LOAD_TITLES[found.load]}"
    rows = [
        [found.number(point.load), *(NOTHING if one is None else one.text for one in point.ratios.values())]
        for point in pair.points
    ]
    if pair.throughput is not None:
        at = f"at {factor(pair.interactivity_tps or 0.0)} tok/s/user"
        rows.append([at, pair.throughput.text, *(NOTHING for _ in list(RATIO_TITLES)[1:])])
    return TextTable([heading, *RATIO_TITLES.values()], rows)
