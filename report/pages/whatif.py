"""A what-if: its records, exactly as ``sim what-if --json`` writes them, and the same as tables for a terminal."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import msgspec

from measure import wording
from measure.cohorts import MAIN, cohort_title
from measure.table import table_lines
from measure.thresholds import TOO_UNCERTAIN

SCHEMA: Final = "kvtape-what-if/1"
LEVELS: Final = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
TTFT: Final = "ttft"
NOT_TRUSTED: Final = " (not to be trusted: the model's error on this capture is larger than the gates' limits)"


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A number and the interval of its values over the members. Null: past the end of the run."""

    middle: float | None
    """The middle member's. Null with ``beyond``: more than that; null without: not known."""
    low: float | None
    high: float | None
    beyond: float | None = None
    """A lower bound, where the curve stops before the level."""


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """A number of a forecast, and the scenario's effect on it, member by member, without the noise that both share."""

    value: Span
    difference: Span | None = None
    """Scenario − base, and the ratio of the two. Null: there is no base to this row."""
    ratio: Span | None = None


class EffectGate(msgspec.Struct, frozen=True, kw_only=True):
    """A limit on a scenario, judged at the middle member."""

    gate: str
    row: str
    measure: str
    key: str | None
    """``difference`` or ``ratio``; null: the forecast itself."""
    passed: bool
    sure: bool
    """False: a part of the members says otherwise, so that it neither passed nor failed."""
    span: Span | None
    """Null: the forecast has no such number."""


class DemandSaid(msgspec.Struct, frozen=True, kw_only=True):
    """Work that a load asks of the engine, per second of its arrivals; null: fewer than two independent arrivals."""

    utilization: float | None
    """Work asked for over capacity: 1 and more is saturated."""
    prefill: float | None
    """Seconds of step time for uncached prompt tokens."""
    decode: float | None
    """Seconds of step time for generated tokens."""
    frontend: float | None
    """Seconds of the API server on the engine's core."""
    capacity: float | None
    """Seconds of such work in a second of the engine with full batches."""
    in_flight_growth_per_s: float | None
    """Growth of the number of requests in flight, over the arrivals that wait for no other request."""
    in_flight_at_end: int
    """Requests in flight at the last such arrival, itself not included."""
    saturated: bool


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet's routing, of a run without noise."""

    engines: int
    route: str
    most_requests: int
    """On one engine; and the fewest."""
    fewest_requests: int
    work_ratio: float
    """Step time of the busiest engine over the mean."""
    failed: int
    """Requests that failed as an engine died or none was up."""


class TiersSaid(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of the memory behind the pool, of a run without noise."""

    loads: int
    loaded_tokens: int
    read_gb: float
    written_gb: float
    kept_blocks: int
    evicted_blocks: int
    mean_load_tokens: float
    """Of a transfer to the pool."""
    break_even_gb_per_s: Span | None
    """Bandwidth from which such a transfer is faster than computing its tokens. Null: nothing was loaded."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT survival: the share of requests still without a first token after each time."""

    time_ms: list[float]
    middle: list[float]
    low: list[float]
    high: list[float]
    stops: bool
    """The curve ends where the capture would have ended, with requests still waiting: saturated, open loop."""


Kind = Literal["measured", "capture", "base", "scenario"]
"""The trace's own numbers; their forecast; the forecast that effects are against, if ``--base`` asks for it; others."""
MEASURED: Final = "measured"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The captured load as measured, or a forecast."""

    name: str
    kind: Kind
    settings: dict[str, int | float | str | bool]
    rate: float
    cold_prompts: bool
    num_gpu_blocks: int
    measures: dict[str, Measure]
    """Of the measured row: those that the trace tells."""
    errors: dict[str, float] = {}
    """By measure, forecast / measured − 1. Of the row ``capture`` alone."""
    demand: DemandSaid | None = None
    """Null: measured, not forecast."""
    routing: Routing | None = None
    """Null: one engine."""
    tiers: TiersSaid | None = None
    """Null: no memory behind the pool."""
    warnings: list[str] = []
    """Conditions that no capture showed."""
    assumptions: list[str] = []
    """Of a scenario's tiers, workers and GPUs: nothing here could confirm them."""
    curves: dict[str, Curve]


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """A whole what-if: the measured row where the trace has times, forecasts after it."""

    schema: Literal["kvtape-what-if/1"] = SCHEMA
    trace: str
    trace_digest: str
    model_digest: str
    members: int
    seed: int
    confidence: float
    paced: bool
    requests: int
    cohorts: dict[str, int]
    engine: dict[str, Any]
    """Settings of the forecast that effects are against."""
    verdicts: list[str]
    """Validation of the model, on this trace or another, and its error on this very capture."""
    unchanged: str | None = None
    """Reason why every scenario equals the base in every member. Null: some differ."""
    notes: list[str]
    rows: list[Row]
    gates: list[EffectGate] = []


def shown_rows(result: WhatIf) -> list[Row]:
    """Return the rows to show: no scenario where none changes anything."""
    return [row for row in result.rows if result.unchanged is None or row.kind != "scenario"]


def settings_sentence(result: WhatIf) -> str:
    engine, base = result.engine, next(row for row in reversed(result.rows) if row.kind != "scenario")
    said = f"effects are against {base.name}: {engine['num_gpu_blocks']:,} blocks of {engine['block_size']} tokens"
    for setting in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        if engine[setting] is not None:
            said += f", {setting.replace('_', '-')} {engine[setting]:,}"
    return f"{said}, rate ×{base.rate:g}"


def headline(result: WhatIf) -> str:
    """Return the best scenario and its effect on TTFT p90 in a sentence, in the cohort that shows a cache."""
    cohort = telling_cohort(result)
    name, scenarios = ttft(cohort, "p90"), [row for row in result.rows if row.kind == "scenario"]
    base = next(row for row in reversed(result.rows) if row.kind != "scenario")
    title = f"TTFT p90 ({cohort_title(cohort).lower()})"
    if result.unchanged is not None:
        return wording.sentence(result.unchanged)
    if not scenarios:
        return f"{title}, {base.name}: {value_text(base, name)} ms."
    best = min(scenarios, key=lambda row: _middle(row.measures[name].value))
    saturated = ", saturated" if best.demand is not None and best.demand.saturated else ""
    said = f"{value_text(best, name)} ms{saturated}, base {value_text(base, name)} ms"
    effect = effect_text(best, name)
    said += f" ({effect})" if effect else ""
    if _middle(best.measures[name].value) < _middle(base.measures[name].value):
        return f"{title} is best with {best.name}: {said}."
    return f"No scenario lowers {title}. The nearest, {best.name}: {said}."


def _middle(span: Span) -> float:
    return float("inf") if span.middle is None else span.middle


def ttft(cohort: str, level: str) -> str:
    return f"{TTFT}.{cohort}.{level}"


def telling_cohort(result: WhatIf) -> str:
    """Return the later turns, where a cache shows; all requests where a trace has none."""
    return MAIN[-1] if MAIN[-1] in result.cohorts else MAIN[0]


def cohort_titles(result: WhatIf) -> dict[str, str]:
    return {name: cohort_title(name) for name in MAIN if name in result.cohorts}


TELLING_FACTOR = 2.0
"""Ratio from which an effect is shown as a factor."""
_Reading = Callable[[float], str]


def describe(result: WhatIf) -> str:
    lines = [
        f"{result.trace}: {result.requests:,} requests, {result.members} members; in brackets "
        f"{result.confidence:.0%} of the members, effects member by member",
        settings_sentence(result),
        *result.verdicts,
    ]
    if result.unchanged is not None:
        lines += [result.unchanged, f"equal: {'; '.join(row.name for row in result.rows if row.kind == 'scenario')}"]
    lines += [f"note: {note}" for note in result.notes]
    for cohort, title in cohort_titles(result).items():
        lines += ["", *_table(result, f"TTFT ms, {title.lower()}", [(ttft(cohort, level), level) for level in LEVELS])]
    lines += ["", *_table(result, "ITL ms", [(f"itl.{level}", level) for level in LEVELS])]
    engine = [("queue.p90", "queue p90 ms"), ("output_tokens_per_s", "output tokens/s"), ("hit_rate", "hit rate")]
    lines += ["", *_table(result, "engine", engine)]
    lines += ["", *(line for row in shown_rows(result) for line in _load_lines(row))]
    lines += [f"warning: {row.name}: {warning}" for row in result.rows for warning in row.warnings]
    lines += [f"assumed: {row.name}: {one}" for row in result.rows for one in row.assumptions]
    lines += [_gate_line(gate) for gate in result.gates]
    return "\n".join(lines)


def _gate_line(gate: EffectGate) -> str:
    reading = wording.factor if gate.key == "ratio" else _reading(gate.measure)
    found = "not known" if gate.span is None else span_text(gate.span, reading)
    state = "passed" if gate.passed else "FAILED" if gate.sure else f"{TOO_UNCERTAIN}, members differ"
    return f"gate {state}: {gate.gate}: {found} with {gate.row}"


def load_sentence(row: Row) -> str:
    """Return the work that a row's load asks for; of a fleet, its routing and the work of the busiest engine."""
    said = _demand_sentence(row)
    said = said if row.routing is None else f"{_routing_sentence(row.routing)}. Busiest engine: {said}"
    return said if row.tiers is None else f"{said}. {_tiers_sentence(row.tiers)}"


def _tiers_sentence(tiers: TiersSaid) -> str:
    said = (
        f"Memory behind the pool: {tiers.loaded_tokens:,} tokens loaded in {tiers.loads:,} transfers "
        f"({tiers.read_gb:,.1f} GB read, {tiers.written_gb:,.1f} GB written)"
    )
    if tiers.break_even_gb_per_s is None:
        return said
    least = span_text(tiers.break_even_gb_per_s, lambda value: f"{value:.2g}")
    return f"{said}; {tiers.mean_load_tokens:,.0f} tokens a transfer, which pays from {least} GB/s on against computing"


def _demand_sentence(row: Row) -> str:
    demand = row.demand
    if demand is None:
        return "as the trace tells"
    if demand.utilization is None:
        return "utilization unknown: fewer than two arrivals that wait for no other request"
    parts = [
        f"{seconds:.2f} s of {kind}"
        for kind, seconds in (("prefill", demand.prefill), ("decode", demand.decode), ("API server", demand.frontend))
        if seconds
    ]
    said = f"utilization {demand.utilization:.0%}: {' + '.join(parts) or 'nothing'} asked for per second, "
    said += f"capacity {demand.capacity:.2f} s"
    if demand.saturated:
        said += "; SATURATED: waits grow for as long as the load goes on"
    if demand.in_flight_growth_per_s is not None:
        growth = f"{demand.in_flight_growth_per_s:+.2f} a second"
        said += f"; {demand.in_flight_at_end:,} in flight at the last arrival ({growth})"
    return said


def _routing_sentence(routing: Routing) -> str:
    said = (
        f"{routing.engines} engines, {routing.route}: {routing.fewest_requests:,} to {routing.most_requests:,} requests"
    )
    said += f" each, the busiest works {routing.work_ratio:.2f} × the mean"
    if routing.failed:
        said += f"; {routing.failed:,} requests FAILED, as an engine died or none was up"
    return said


def span_text(span: Span, reading: _Reading) -> str:
    """``94 [90–99]``; ``> x`` past where the curve stops; a dash where nothing is known."""
    if span.middle is None:
        return "–" if span.beyond is None else f"> {reading(span.beyond)}"
    if span.low is None or (span.high is not None and reading(span.low) == reading(span.high)):
        return reading(span.middle)
    high = "∞" if span.high is None else reading(span.high)
    return f"{reading(span.middle)} [{reading(span.low)}–{high}]"


def effect_text(row: Row, name: str) -> str:
    """Return the difference with its sign; from a factor of two on the factor."""
    measure = row.measures.get(name)
    if measure is None or measure.difference is None:
        return ""
    ratio = measure.ratio
    if ratio is not None and (ratio.middle or ratio.beyond or 0.0) >= TELLING_FACTOR:
        return span_text(ratio, lambda value: f"×{wording.factor(value)}")
    reading = _reading(name)
    return span_text(measure.difference, lambda value: f"{'−' if value < 0 else '+'}{reading(abs(value))}")


def value_text(row: Row, name: str) -> str:
    measure = row.measures.get(name)
    return wording.NOTHING if measure is None else span_text(measure.value, _reading(name))


def error_text(row: Row, name: str) -> str:
    """Return the signed error of the capture's forecast; empty where it is not known."""
    return wording.signed_percent(row.errors[name]) if name in row.errors else ""


def _reading(name: str) -> _Reading:
    if name == "hit_rate":
        return lambda value: f"{value:.1%}"
    if name.endswith("_per_s"):
        return lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    if name in ("preemptions", "unserved"):
        return lambda value: f"{value:,.0f}"
    return wording.duration_ms


def _table(result: WhatIf, title: str, columns: Sequence[tuple[str, str]]) -> list[str]:
    rows = []
    for row in shown_rows(result):
        rows.append([row.name, *(value_text(row, name) for name, _ in columns)])
        for what, reading in (("  error", error_text), ("  effect", effect_text)):
            said = [reading(row, name) for name, _ in columns]
            if any(said):
                rows.append([what, *said])
    return table_lines([title, *(heading for _, heading in columns)], rows, "<", gap="   ")


def _load_lines(row: Row) -> Iterator[str]:
    if row.kind == MEASURED:
        return
    yield f"{row.name}: {load_sentence(row)}"
    preemptions, unserved = (row.measures[name].value for name in ("preemptions", "unserved"))
    if preemptions.high:
        yield f"  {value_text(row, 'preemptions')} preemptions"
    if unserved.high:
        yield f"  {value_text(row, 'unserved')} requests are longer than the engine can serve"
