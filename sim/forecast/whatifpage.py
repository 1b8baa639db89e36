"""A what-if as a page: TTFT survival and a table of each cohort, engine numbers, the work that each load asks for."""

from collections.abc import Iterator, Sequence
from typing import Final

from measure import wording
from measure.cohorts import MAIN, cohort_title
from measure.thresholds import TOO_UNCERTAIN
from report.grid.points import LEVELS, effect_text, reading_of, span_text, value_text
from report.pages.figures import DASHED, Trace, axis, band, figure, line, points
from report.pages.panels import Check, Figure, Page, Panel, Table
from sim.forecast.limits import ttft
from sim.forecast.results import MEASURED, Curve, DemandSummary, EffectGate, Routing, Row, WhatIf

MOST_DRAWN: Final = 8
"""Curves in one figure, the palette's colours; of a longer list these are spread evenly, both ends among them."""
ENGINE: Final = {
    "queue.p90": "queue p90 ms",
    "output_tokens_per_s": "output tok/s",
    "hit_rate": "hit rate",
    "requests_per_s": "requests/s",
    "e2e.p50": "E2E p50 ms",
    "preemptions": "preemptions",
    "unserved": "never served",
}


def what_if_page(result: WhatIf) -> Page:
    rows = shown_rows(result)
    equal = "; ".join(row.name for row in result.rows if row.kind == "scenario")
    lead = (
        f"{result.trace}: {result.requests:,} requests, {result.members} members; in brackets "
        f"{result.confidence:.0%} of the members, effects member by member"
    )
    return Page(
        tool="sim what-if",
        title=result.trace,
        defined="docs/what-if.md",
        headlines=[headline(result)],
        leads=[lead, _settings(result), *result.verdicts, *([f"equal: {equal}"] if result.unchanged else [])],
        notes=result.notes,
        checks=[_check(gate) for gate in result.gates],
        panels=[*_cohort_panels(result), _engine_panel(result, rows)],
        slots={rows[number].name: slot for slot, number in enumerate(drawn_rows(len(rows)))},
        dashed=[row.name for row in rows if row.kind != MEASURED],
    )


def shown_rows(result: WhatIf) -> list[Row]:
    """Return the rows to show: no scenario where none changes anything."""
    return [row for row in result.rows if result.unchanged is None or row.kind != "scenario"]


def _settings(result: WhatIf) -> str:
    engine, base = result.engine, next(row for row in reversed(result.rows) if row.kind != "scenario")
    text = f"effects are against {base.name}: {engine['num_gpu_blocks']:,} blocks of {engine['block_size']} tokens"
    for setting in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        if engine[setting] is not None:
            text += f", {setting.replace('_', '-')} {engine[setting]:,}"
    return f"{text}, rate ×{base.rate:g}"


def headline(result: WhatIf) -> str:
    """Return the best scenario and its effect on TTFT p90 in a sentence, in the cohort that shows a cache."""
    cohort = MAIN[-1] if MAIN[-1] in result.cohorts else MAIN[0]
    name, scenarios = ttft(cohort, "p90"), [row for row in result.rows if row.kind == "scenario"]
    base = next(row for row in reversed(result.rows) if row.kind != "scenario")
    title = f"TTFT p90 ({cohort_title(cohort).lower()})"
    if result.unchanged is not None:
        return wording.sentence(result.unchanged)
    if not scenarios:
        return f"{title}, {base.name}: {value_text(base, name)} ms."
    best = min(scenarios, key=lambda row: _middle(row, name))
    saturated = ", saturated" if best.demand is not None and best.demand.saturated else ""
    text = f"{value_text(best, name)} ms{saturated}, base {value_text(base, name)} ms"
    effect = effect_text(best, name)
    text += f" ({effect})" if effect else ""
    if _middle(best, name) < _middle(base, name):
        return f"{title} is best with {best.name}: {text}."
    return f"No scenario lowers {title}. The nearest, {best.name}: {text}."


def _middle(row: Row, name: str) -> float:
    middle = row.middle(name)
    return float("inf") if middle is None else middle


def _check(gate: EffectGate) -> Check:
    reading = wording.factor if gate.key == "ratio" else reading_of(gate.measure)
    found = "not known" if gate.span is None else span_text(gate.span, reading)
    state = "passed" if gate.passed else "FAILED" if gate.sure else f"{TOO_UNCERTAIN}, members differ"
    return Check("gate", state, f"{gate.gate}: {found} with {gate.row}")


def _cohort_panels(result: WhatIf) -> Iterator[Panel]:
    rows = shown_rows(result)
    left_out = len(rows) - len(drawn_rows(len(rows)))
    for cohort in (name for name in MAIN if name in result.cohorts):
        title = f"TTFT, {cohort_title(cohort).lower()}"
        columns = {ttft(cohort, level): level for level in LEVELS}
        yield Panel(
            chapter=title,
            title=title,
            id="survival-" + "".join(letter if letter.isalnum() else "-" for letter in cohort),
            figure=survival_figure(result, cohort),
            caption=f"TTFT survival of {result.cohorts[cohort]:,} requests. Solid: measured; dashed: forecasts, with "
            "their members' band; widest: the load that effects are against. A cross: the capture would have ended "
            "here with requests still waiting." + (f" {left_out} more are in the table." if left_out else ""),
            tables=[_table(f"TTFT ms, {cohort_title(cohort).lower()}", rows, columns)],
        )


def _table(title: str, rows: Sequence[Row], columns: dict[str, str], narrow: int | None = None) -> Table:
    """Return values with, below them, the effect of a scenario or the error of the capture's forecast."""
    cells = [[row.name, *(f"{value_text(row, name)}\n{_below(row, name)}".strip() for name in columns)] for row in rows]
    return Table([title, *columns.values()], cells, narrow=narrow)


def _below(row: Row, name: str) -> str:
    if row.kind == "capture":
        return f"error {wording.signed_percent(row.errors[name])}" if name in row.errors else ""
    return effect_text(row, name)


def _engine_panel(result: WhatIf, rows: Sequence[Row]) -> Panel:
    lines = [f"{row.name}: {load_sentence(row)}" for row in rows if row.demand is not None]
    lines += [f"warning: {row.name}: {warning}" for row in result.rows for warning in row.warnings]
    lines += [f"assumed: {row.name}: {one}" for row in result.rows for one in row.assumptions]
    tables = [
        _table("ITL ms", rows, {f"itl.{level}": level for level in LEVELS}),
        _table("engine", rows, ENGINE, narrow=4),
    ]
    return Panel(chapter="Engine", title="Engine", tables=tables, lines=lines)


def load_sentence(row: Row) -> str:
    """Return the work that a row's load asks for; of a fleet, its routing and the work of the busiest engine."""
    text = "measured" if row.demand is None else _demand_sentence(row.demand)
    text = text if row.routing is None else f"{_routing_sentence(row.routing)}. Busiest engine: {text}"
    for name, words in (("preemptions", "preemptions"), ("unserved", "requests longer than the engine can serve")):
        if (high := row.measures[name].value.high) is not None and high > 0:
            text += f"; {value_text(row, name)} {words}"
    if row.tiers is not None:
        text += (
            f". Memory behind the pool: {row.tiers.loaded_tokens:,} tokens loaded in {row.tiers.loads:,} transfers "
            f"({row.tiers.read_gb:,.1f} GB read, {row.tiers.written_gb:,.1f} GB written)"
        )
    return text


def _demand_sentence(demand: DemandSummary) -> str:
    if demand.utilization is None:
        return "utilization unknown: fewer than two arrivals that wait for no other request"
    parts = [
        f"{seconds:.2f} s of {kind}"
        for kind, seconds in (("prefill", demand.prefill), ("decode", demand.decode), ("API server", demand.frontend))
        if seconds
    ]
    text = f"utilization {demand.utilization:.0%}: {' + '.join(parts) or 'nothing'} asked for per second, "
    text += f"capacity {demand.capacity:.2f} s"
    if demand.saturated:
        text += "; SATURATED: waits grow for as long as the load goes on"
    if demand.in_flight_growth_per_s is not None:
        growth = f"{demand.in_flight_growth_per_s:+.2f} a second"
        text += f"; {demand.in_flight_at_end:,} in flight at the last arrival ({growth})"
    return text


def _routing_sentence(routing: Routing) -> str:
    counts = f"{routing.fewest_requests:,} to {routing.most_requests:,} requests each"
    text = (
        f"{routing.engines} engines, {routing.route}: {counts}, the busiest works {routing.work_ratio:.2f} × the mean"
    )
    return f"{text}; {routing.failed:,} requests FAILED, as an engine died or none was up" if routing.failed else text


def drawn_rows(count: int) -> list[int]:
    """Return the rows to draw of ``count``, the first and the last always."""
    if count <= MOST_DRAWN:
        return list(range(count))
    return sorted({round(number * (count - 1) / (MOST_DRAWN - 1)) for number in range(MOST_DRAWN)})


SCENARIO_DASHES: Final = ("2px,3px", "10px,3px", "10px,3px,2px,3px")
"""Scenarios in turn, each unlike the base's: equal curves both show."""


def survival_figure(result: WhatIf, cohort: str) -> Figure:
    """Draw the rows' curves: the measured and the base's wide and below, so that none hides an equal curve.

    Scenarios of one curve are one line with all their names.
    """
    data: list[Trace] = []
    rows, scenarios = shown_rows(result), list[tuple[Curve, Trace]]()
    for slot, number in enumerate(drawn_rows(len(rows))):
        row, curve = rows[number], rows[number].curves.get(cohort)
        if curve is None:
            continue
        if row.kind == "scenario" and (equal := next((line for other, line in scenarios if other == curve), None)):
            equal["name"] += f" = {row.name}"
            continue
        traces = _curve_traces(row, curve, slot)
        data += traces
        if row.kind == "scenario":
            scenarios.append((curve, next(trace for trace in traces if trace["meta"]["part"] == "line")))
    y_axis = axis("still without a first token", tickformat=".3~%", range=[0, 1.02])
    return figure(data, axis("TTFT (ms)", type="log"), y_axis)


def _curve_traces(row: Row, curve: Curve, slot: int) -> list[Trace]:
    measured, scenario = row.kind == MEASURED, row.kind == "scenario"
    traces = [] if measured else band(curve.time_ms, curve.low, curve.high, slot, line={"shape": "hv"})
    traces.append(
        line(
            curve.time_ms,
            curve.middle,
            slot,
            width=2.0 if scenario else 3.0 if measured else 4.5,
            dash="solid" if measured else SCENARIO_DASHES[slot % 3] if scenario else DASHED,
            name=row.name,
            line={"shape": "hv"},
            hovertemplate="%{fullData.name}: %{y:.1%} after %{x:,.0f} ms<extra></extra>",
        )
    )
    if curve.stops:
        hover = "the capture's end: %{y:.1%} would wait longer<extra></extra>"
        look = {"size": 11, "symbol": "x"}
        traces.append(points(curve.time_ms[-1:], curve.middle[-1:], slot, look, showlegend=False, hovertemplate=hover))
    return traces
