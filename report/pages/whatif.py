"""A what-if: its records, exactly as ``sim what-if --json`` writes them, and the same as tables for a terminal."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

import msgspec

from measure import wording
from measure.cohorts import MAIN, cohort_title
from measure.table import table_lines

SCHEMA: Final = "kvtape-what-if/1"
LEVELS: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
TTFT: Final = "ttft"


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
    """Scenario − captured, and the ratio of the two. Null: this is the captured one."""
    ratio: Span | None = None


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


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT survival: the share of requests still without a first token after each time."""

    time_ms: list[float]
    middle: list[float]
    low: list[float]
    high: list[float]
    stops: bool
    """The curve ends where the capture would have ended, with requests still waiting: saturated, open loop."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario, or the capture as it was."""

    name: str
    settings: dict[str, int | str | bool]
    rate: float
    cold_prompts: bool
    num_gpu_blocks: int
    measures: dict[str, Measure]
    demand: DemandSaid
    warnings: list[str]
    """Assumptions that no capture supports."""
    curves: dict[str, Curve]


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """A whole what-if; the first row is the capture as it was."""

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
    notes: list[str]
    rows: list[Row]


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
        f"{result.confidence:.0%} of the members, effects member by member"
    ]
    lines += [f"note: {note}" for note in result.notes]
    for cohort, title in cohort_titles(result).items():
        lines += ["", *_table(result, f"TTFT ms, {title.lower()}", [(ttft(cohort, level), level) for level in LEVELS])]
    lines += ["", *_table(result, "ITL ms", [(f"itl.{level}", level) for level in LEVELS])]
    engine = [("queue.p90", "queue p90 ms"), ("output_tokens_per_s", "output tokens/s"), ("hit_rate", "hit rate")]
    lines += ["", *_table(result, "engine", engine)]
    lines += ["", *(line for row in result.rows for line in _load_lines(row))]
    lines += [f"warning: {row.name}: {warning}" for row in result.rows for warning in row.warnings]
    return "\n".join(lines)


def load_sentence(row: Row) -> str:
    demand = row.demand
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


def span_text(span: Span, reading: _Reading) -> str:
    """``94 [90–99]``; ``> x`` past where the curve stops; a dash where nothing is known."""
    if span.middle is None:
        return "–" if span.beyond is None else f"> {reading(span.beyond)}"
    if span.low is None or span.low == span.high:
        return reading(span.middle)
    high = "∞" if span.high is None else reading(span.high)
    return f"{reading(span.middle)} [{reading(span.low)}–{high}]"


def effect_text(row: Row, name: str) -> str:
    """Return the difference with its sign; from a factor of two on the factor."""
    measure = row.measures[name]
    if measure.difference is None:
        return ""
    ratio = measure.ratio
    if ratio is not None and (ratio.middle or ratio.beyond or 0.0) >= TELLING_FACTOR:
        return span_text(ratio, lambda value: f"×{wording.factor(value)}")
    reading = _reading(name)
    return span_text(measure.difference, lambda value: f"{'−' if value < 0 else '+'}{reading(abs(value))}")


def value_text(row: Row, name: str) -> str:
    return span_text(row.measures[name].value, _reading(name))


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
    for row in result.rows:
        rows.append([row.name, *(value_text(row, name) for name, _ in columns)])
        effects = [effect_text(row, name) for name, _ in columns]
        if any(effects):
            rows.append(["  effect", *effects])
    return table_lines([title, *(heading for _, heading in columns)], rows, "<", gap="   ")


def _load_lines(row: Row) -> Iterator[str]:
    yield f"{row.name}: {load_sentence(row)}"
    preemptions, unserved = (row.measures[name].value for name in ("preemptions", "unserved"))
    if preemptions.high:
        yield f"  {value_text(row, 'preemptions')} preemptions"
    if unserved.high:
        yield f"  {value_text(row, 'unserved')} requests are longer than the engine can serve"
