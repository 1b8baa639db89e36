"""A sweep as one HTML page: the verdict, Pareto figures, hits and latency by load, labels against each other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from measure.table import TextTable
from measure.wording import factor
from report.pages.figures import DASHED, Figure, Trace, axis, figure, five_digits, line, log_scale, plain, points
from report.pages.page import Card, cohort_id, render
from report.sweeps.results import Contrast, Point, Ratio, Sweep, Value, Workload
from report.sweeps.terminal import contrast_table, latency_table, overview_table
from report.sweeps.verdict import headlines, short
from report.trace.panels import Panel

LOAD_AXES: Final = {
    "parallel": "concurrency",
    "rate": "arrivals a second",
    "in_flight": "mean requests in flight",
}
LOG_FROM: Final = 16.0
"""Largest over smallest load from which on the loads' axis is a log axis."""
MOST_CARDS: Final = 4


@dataclass(frozen=True, slots=True)
class DrawnSweep:
    """Panels of a sweep's page."""

    overall: Sequence[Panel]
    chapters: Sequence[tuple[Workload, Sequence[Panel]]]

    @property
    def figures(self) -> dict[str, Figure]:
        """Figures by id."""
        panels = [*self.overall, *(panel for _, panels in self.chapters for panel in panels)]
        return {panel.id: panel.figure for panel in panels if panel.figure is not None}


def draw_sweep(sweep: Sweep) -> DrawnSweep:
    """Draw every panel that there is something for."""
    slots, several = slots_of(sweep), len(sweep.workloads) > 1
    overall = [panel for panel in (_forest(sweep, slots),) if several and panel.figure is not None]
    return DrawnSweep(overall, [(found, _panels(found, slots)) for found in sweep.workloads])


READING: Final = (
    "Output tokens per second are {throughput}. Intervals are of {confidence:.0%}: by repeats, Student's t on the "
    "ratios' logarithms; by runs, with the spread of the repeated label; by sessions, {draws} bootstrap draws of whole "
    "sessions. These last leave out what differs from run to run, such as the engine's pace."
)


def render_sweep(sweep: Sweep, drawn: DrawnSweep) -> str:
    slots = slots_of(sweep)
    steady = sweep.workloads[0].load == "parallel"
    throughput = "those of the steady state, without a run's first 20 %" if steady else "a run's, over its wall time"
    return render(
        "sweep.html.jinja",
        drawn.figures,
        tool="report sweep",
        title=", ".join([found.name for found in sweep.workloads if found.name] or slots),
        headlines=headlines(sweep),
        defined="docs/metrics.md",
        sweep=sweep,
        slots=slots,
        cards=cards(sweep),
        overall=drawn.overall,
        chapters=drawn.chapters,
        tables=tables,
        reading=READING.format(throughput=throughput, confidence=sweep.confidence, draws=sweep.draws),
    )


def slots_of(sweep: Sweep) -> dict[str, int]:
    """Return each label's colour; labels of one name in several workloads share theirs."""
    names = dict.fromkeys(short(line.label) for found in sweep.workloads for line in found.lines)
    return {name: slot for slot, name in enumerate(names)}


def workload_id(found: Workload) -> str:
    return cohort_id(found.name or "loads")


def tables(found: Workload) -> list[tuple[str, TextTable]]:
    """Return the tables of a workload, each with its title."""
    pairs = [
        (f"{short(pair.label)} over {short(pair.against)}, with intervals of 90 %", contrast_table(found, pair))
        for pair in found.contrasts
        if pair.points
    ]
    return [("Throughput and hits", overview_table(found)), ("Latency", latency_table(found)), *pairs]


def cards(sweep: Sweep) -> list[Card]:
    """Return the numbers of a single workload with two labels or SLOs."""
    if len(sweep.workloads) > 1:
        return []
    found = sweep.workloads[0]
    told = [card for pair in found.contrasts[:1] for card in _pair_cards(found, pair)]
    for each in found.lines:
        if each.judged:
            largest = "none" if each.largest_load is None else found.number(each.largest_load)
            told.append(Card(f"Largest load within SLOs, {short(each.label)}", largest, LOAD_AXES[found.load]))
    return told[:MOST_CARDS]


def _pair_cards(found: Workload, pair: Contrast) -> Iterator[Card]:
    names = f"{short(pair.label)} / {short(pair.against)}"
    if pair.throughput is not None and found.load == "parallel":
        at = f"at {factor(pair.interactivity_tps or 0.0)} tok/s per user"
        yield Card(f"Output tok/s, {names}", f"×{factor(pair.throughput.value)}", _detail(pair.throughput, at))
    if pair.points and (ratio := pair.points[-1].ratios["ttft_p90_ms"]) is not None:
        at = f"at {found.load_text(pair.points[-1].load)}"
        yield Card(f"TTFT p90, {names}", f"×{factor(ratio.value)}", _detail(ratio, at))


def _detail(ratio: Ratio, at: str) -> str:
    return " · ".join(word for word in (at, ratio.span and f"{ratio.span} by {ratio.by}") if word)


def _panels(found: Workload, slots: dict[str, int]) -> list[Panel]:
    """Draw a workload; of one load for each label there is nothing to join by lines."""
    if max(len(line.points) for line in found.lines) == 1 and (found.name or len(found.lines) == 1):
        return []
    hits = [("eligible_hit_rate", "eligible", "solid"), ("hit_rate", "all prompts", DASHED)]
    waits = [("ttft_p50_ms", "p50", "solid"), ("ttft_p90_ms", "p90", DASHED)]
    rate, good = (axis(title, tickformat=".0%", range=[0, 1.02]) for title in ("hit rate", "of all requests"))
    drawn = {
        "interactivity": ("Throughput and interactivity", _pareto(found, slots, PACE)),
        "latency": ("Throughput and session latency", _pareto(found, slots, LATENCY)),
        "hits": ("Hit rate by load", _by_load(found, slots, hits, rate, "%{y:.1%}")),
        "ttft": ("TTFT by load", _by_load(found, slots, waits, axis("TTFT (ms)", type="log"), "%{y:,.1f} ms")),
        "goodput": (
            "Goodput within the SLOs",
            _by_load(found, slots, [("goodput_share", "", "solid")], good, "%{y:.1%}"),
        ),
    }
    return [
        Panel(f"{name}-{workload_id(found)}", title, figure, CAPTIONS[name], half=True, toggles=TOGGLES.get(name, ""))
        for name, (title, figure) in drawn.items()
        if figure is not None
    ]


CAPTIONS: Final = {
    "interactivity": "Higher and further right is better. The line joins a label's Pareto set; hollow points are "
    "dominated. A number is the load, a bar the range of repeats.",
    "latency": "Higher and further left is better. Whole sessions, from the first request to the last token, at "
    "their 90th percentile.",
    "hits": "Prompt tokens from the cache: of those that came before in whole blocks (mean over sessions), and of all. "
    "The rate falls where the cache evicts blocks that return.",
    "ttft": "Time to the first token: half of the requests, and nine of ten, had theirs by then.",
    "goodput": "Requests that completed within every SLO on a request.",
    "all": "Left of 1, first tokens come sooner than with the first label. Bars are intervals of 90 %.",
}
TOGGLES: Final = {"interactivity": "x", "latency": "x", "ttft": "xy", "hits": "x"}


@dataclass(frozen=True, slots=True)
class _Axis:
    """A metric that throughput is drawn against."""

    name: str
    """Of its Pareto set."""
    metric: str
    title: str
    unit: float
    """Factor from the metric's own unit."""


PACE: Final = _Axis("interactivity", "interactivity_tps", "tok/s per user, p50", 1.0)
LATENCY: Final = _Axis("latency", "session_latency_p90_ms", "session latency p90 (s)", 1e-3)
TEXT_PLACES: Final = ("bottom center", "top center", "middle right", "middle left")
"""Side of a point on which its load stands, by label, so that labels close together can be read."""


def _pareto(found: Workload, slots: dict[str, int], on: _Axis) -> Figure | None:
    """Draw throughput against an axis: a line through each label's Pareto set, dominated points dimmed."""
    data: list[Trace] = []
    for each in found.lines:
        told = [point for point in each.points if None not in (point.median(on.metric), point.median("throughput_tps"))]
        told.sort(key=lambda point: point.median(on.metric) or 0.0)
        for kept in (True, False):
            some = [point for point in told if (on.name in point.pareto) == kept]
            if some:
                data += _marks(found, short(each.label), some, slots, on, kept=kept)
    titles = axis(on.title, rangemode="tozero"), axis("output tokens per second", rangemode="tozero")
    return figure(data, *titles) if data else None


def _marks(
    found: Workload, label: str, some: Sequence[Point], slots: dict[str, int], on: _Axis, *, kept: bool
) -> Iterator[Trace]:
    name, slot, loads = plain(label), slots[label], LOAD_AXES[found.load]
    x = [five_digits((point.median(on.metric) or 0.0) * on.unit) for point in some]
    y = [five_digits(point.median("throughput_tps") or 0.0) for point in some]
    if kept and len(some) > 1:
        yield line(x, y, slot, name=name, legendgroup=name, hoverinfo="skip")
    look = {"size": 10, "symbol": "circle"} if kept else {"size": 8, "symbol": "circle-open", "opacity": 0.45}
    yield points(
        x,
        y,
        slot,
        look,
        name=name if kept else f"{name}, dominated",
        legendgroup=name,
        showlegend=kept and len(some) == 1,
        mode="markers+text",
        text=[found.number(point.load) for point in some],
        textposition=TEXT_PLACES[slot % len(TEXT_PLACES)],
        cliponaxis=False,
        **(_reaches(some, on) if kept else {}),
        hovertemplate=f"%{{fullData.name}}, {loads} %{{text}}: %{{y:,.1f}} tok/s, %{{x:,.1f}}<extra></extra>",
    )


def _reaches(some: Sequence[Point], on: _Axis) -> Trace:
    """Return the ranges of repeats as error bars; none where no load has several."""
    if all(len(point.runs) == 1 for point in some):
        return {}
    x, y = ([point.values[name] for point in some] for name in (on.metric, "throughput_tps"))
    return {"error_x": _reach(x, on.unit), "error_y": _reach(y, 1.0)}


def _reach(values: Sequence[Value | None], unit: float) -> dict[str, Any]:
    """Return error bars from the smallest to the largest repeat."""
    known = [one or Value(0.0, 0.0, 0.0) for one in values]
    return {
        "type": "data",
        "symmetric": False,
        "array": [five_digits((one.high - one.median) * unit) for one in known],
        "arrayminus": [five_digits((one.median - one.low) * unit) for one in known],
        "thickness": 1.4,
        "width": 3,
    }


def _by_load(
    found: Workload, slots: dict[str, int], metrics: Sequence[tuple[str, str, str]], y_axis: dict[str, Any], hover: str
) -> Figure | None:
    """Draw metrics against the load, each with its part of the name and its dash."""
    data: list[Trace] = []
    for each in found.lines:
        label, slot = plain(short(each.label)), slots[short(each.label)]
        for metric, part, dash in metrics:
            told = [(point.load, value) for point in each.points if (value := point.median(metric)) is not None]
            x, y = [five_digits(load) for load, _ in told], [five_digits(value) for _, value in told]
            name = f"{label}, {part}" if part else label
            text = f"{name}: {hover} at %{{x:,.3~f}}<extra></extra>"
            if told:
                data.append(line(x, y, slot, dash=dash, name=name, legendgroup=name, hoverinfo="skip"))
                look = {"size": 7, "symbol": "circle" if dash == "solid" else "circle-open"}
                data.append(points(x, y, slot, look, name=name, legendgroup=name, showlegend=False, hovertemplate=text))
    loads = [point.load for each in found.lines for point in each.points]
    log = {"type": "log"} if min(loads) > 0 and max(loads) / min(loads) > LOG_FROM else {"rangemode": "tozero"}
    return figure(data, axis(LOAD_AXES[found.load], **log), y_axis) if data else None


def _forest(sweep: Sweep, slots: dict[str, int]) -> Panel:
    """Draw TTFT p90 of every label over the first one's, a row for each load of several workloads."""
    names = [
        (found.name, point.load, f"{plain(found.name)}, {found.load_text(point.load)}")
        for found in sweep.workloads
        for point in found.lines[0].points
    ]
    places = {(name, load): place for place, (name, load, _) in enumerate(names)}
    pairs = [(found.name, pair) for found in sweep.workloads for pair in found.contrasts]
    data: list[Trace] = []
    labels = list(dict.fromkeys(short(pair.label) for _, pair in pairs))
    for number, label in enumerate(labels):
        told = [
            (places[name, point.load] + 0.22 * (number - (len(labels) - 1) / 2), ratio)
            for name, pair in pairs
            if short(pair.label) == label
            for point in pair.points
            if (ratio := point.ratios["ttft_p90_ms"]) is not None
        ]
        if told:
            data.append(_forest_row(label, told, slots[label]))
    against = ", ".join(dict.fromkeys(short(pair.against) for _, pair in pairs))
    title = f"TTFT p90 over that of {plain(against)}"
    even = line([1.0, 1.0], [-0.6, len(names) - 0.4], -1, width=1, hoverinfo="skip", showlegend=False)
    rows = {"tickvals": list(range(len(names))), "ticktext": [text for *_, text in names], "autorange": "reversed"}
    x_axis = axis("ratio", type="log")
    drawn = figure([even, *data], x_axis, rows, height=140 + 26 * len(names)) if data else None
    if drawn is not None:
        found = [ratio for _, pair in pairs for point in pair.points if (ratio := point.ratios["ttft_p90_ms"])]
        ends = [end for ratio in found for end in (ratio.low or ratio.value, ratio.high or ratio.value, 1.0)]
        drawn["layout"]["meta"]["log"]["xaxis"] = log_scale(min(ends), max(ends))
    return Panel("all", title, drawn, CAPTIONS["all"], toggles="x")


def _forest_row(label: str, told: Sequence[tuple[float, Ratio]], slot: int) -> Trace:
    reach = {
        "array": [five_digits((ratio.high or ratio.value) - ratio.value) for _, ratio in told],
        "arrayminus": [five_digits(ratio.value - (ratio.low or ratio.value)) for _, ratio in told],
    }
    return points(
        [five_digits(ratio.value) for _, ratio in told],
        [place for place, _ in told],
        slot,
        {"size": 8},
        name=plain(label),
        error_x={"type": "data", "symmetric": False, "thickness": 1.6, "width": 4, **reach},
        hovertemplate="%{fullData.name}: ×%{x:.3~f}<extra></extra>",
    )
