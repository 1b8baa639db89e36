"""A what-if as tables for a terminal: each scenario below the capture, and its effect below it."""

from collections.abc import Callable, Iterator, Sequence

from measure import wording
from report.pages.whatifresults import LEVELS, Row, Span, WhatIf, cohort_titles, ttft

TELLING_FACTOR = 2.0
"""From here on a factor says more than a difference."""
_Reading = Callable[[float], str]


def describe(result: WhatIf) -> str:
    """Everything in lines: TTFT by cohort, the engine's numbers, the load, warnings."""
    lines = [
        f"{result.trace}: {result.requests:,} requests, {result.members} members; in brackets "
        f"{result.confidence:.0%} of the members, effects member by member"
    ]
    lines += [f"note: {note}" for note in result.notes]
    for cohort, title in cohort_titles(result).items():
        lines += ["", *_table(result, f"TTFT ms, {title.lower()}", [(ttft(cohort, level), level) for level in LEVELS])]
    lines += ["", *_table(result, "gap between tokens, ms", [(f"itl.{level}", level) for level in LEVELS])]
    engine = [("queue.p90", "queue p90 ms"), ("output_tokens_per_s", "output tokens/s"), ("hit_rate", "hit rate")]
    lines += ["", *_table(result, "engine", engine)]
    lines += ["", *(line for row in result.rows for line in _load_lines(row))]
    lines += [f"warning: {row.name}: {warning}" for row in result.rows for warning in row.warnings]
    return "\n".join(lines)


def load_sentence(row: Row) -> str:
    """How much of what the engine can do this load is, in a sentence."""
    demand = row.demand
    if demand.load is None:
        return "one arrival that waits for nobody is no rate: nothing is known of the load"
    parts = [
        f"{seconds:.2f} s of {what}"
        for what, seconds in (("prefill", demand.prefill), ("decode", demand.decode), ("front end", demand.frontend))
        if seconds
    ]
    said = f"{' + '.join(parts) or 'nothing'} asked for per second, {demand.yield_at_most:.2f} s done at most: "
    said += f"{demand.load:.0%} of what the engine can do"
    if demand.saturated:
        said += ", SATURATED: waits grow for as long as the load goes on"
    if demand.in_flight_growth_per_s is not None:
        growth = f"{demand.in_flight_growth_per_s:+.2f} a second"
        said += f"; {demand.in_flight_at_end:,} in flight when the last comes ({growth})"
    return said


def span_text(span: Span, reading: _Reading) -> str:
    """``94 [90–99]``; ``> x`` past where the curve stops; a dash where nothing is known."""
    if span.middle is None:
        return "–" if span.beyond is None else f"> {reading(span.beyond)}"
    if span.low is None:
        return reading(span.middle)
    if span.low == span.high:
        return reading(span.middle)
    high = "∞" if span.high is None else reading(span.high)
    return f"{reading(span.middle)} [{reading(span.low)}–{high}]"


def effect_text(row: Row, name: str) -> str:
    """The difference with its sign; from a factor of two on the factor."""
    measure = row.measures[name]
    if measure.difference is None:
        return ""
    ratio = measure.ratio
    if ratio is not None and (ratio.middle or ratio.beyond or 0.0) >= TELLING_FACTOR:
        return span_text(ratio, lambda value: f"×{wording.factor(value)}")
    return span_text(measure.difference, signed(_reading(name)))


def value_text(row: Row, name: str) -> str:
    """The value with its interval."""
    return span_text(row.measures[name].value, _reading(name))


def signed(reading: _Reading) -> _Reading:
    """The same reading with a plus or a minus before it."""
    return lambda value: f"{'−' if value < 0 else '+'}{reading(abs(value))}"


def _reading(name: str) -> _Reading:
    if name == "hit_rate":
        return lambda value: f"{value:.1%}"
    if name.endswith("_per_s"):
        return lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    if name in ("preemptions", "unserved"):
        return lambda value: f"{value:,.0f}"
    return wording.duration_ms


def _table(result: WhatIf, title: str, columns: Sequence[tuple[str, str]]) -> Iterator[str]:
    lines = [[title, *(heading for _, heading in columns)]]
    for row in result.rows:
        lines.append([row.name, *(value_text(row, name) for name, _ in columns)])
        effects = [effect_text(row, name) for name, _ in columns]
        if any(effects):
            lines.append(["  effect", *effects])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        yield first.ljust(widths[0]) + "".join(
            cell.rjust(width + 3) for cell, width in zip(others, widths[1:], strict=True)
        )


def _load_lines(row: Row) -> Iterator[str]:
    yield f"{row.name}: {load_sentence(row)}"
    preemptions, unserved = (row.measures[name].value for name in ("preemptions", "unserved"))
    if preemptions.high:
        yield f"  {value_text(row, 'preemptions')} preemptions"
    if unserved.high:
        yield f"  {value_text(row, 'unserved')} requests are longer than the engine can ever serve"
