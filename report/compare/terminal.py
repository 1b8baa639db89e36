"""A comparison as tables for a terminal: 80 columns, readable when piped."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from textwrap import wrap

from rich.console import Console
from rich.text import Text

from measure.cohorts import MAIN, cohort_order, cohort_title
from measure.metrics.tables import slo_lines
from measure.table import table_lines
from measure.wording import NOTHING, duration_ms, share, signed_percent
from report.compare.baselines import MEASURES, closer
from report.compare.cells import JUDGED_LEVELS
from report.compare.ensembles import counted_cohorts
from report.compare.headline import error_text as reached_text
from report.compare.results import (
    LEVELS,
    Comparison,
    Duration,
    DurationError,
    Forecast,
    Metric,
    Pair,
    Quantile,
    QuantileError,
)
from tracefile.commandline.console import CommandConsole
from tracefile.commandline.printing import printable

_DETAILED: tuple[Metric, ...] = ("tpot", "itl", "e2e")
_WIDEST_LABEL = 20


def console_for(*, json: bool) -> Console:
    """Return a console on stdout, or on stderr beside JSON."""
    return CommandConsole(sys.stderr if json else sys.stdout, highlight=False)


def print_comparison(result: Comparison, console: Console) -> None:
    for text, style in _parts(result):
        console.print(Text(printable(text), style=style), soft_wrap=style == "")


def _parts(result: Comparison) -> Iterator[tuple[str, str]]:
    yield from ((sentence, "bold") for sentence in result.headline)
    yield from ((f"note: {note}", "yellow") for note in result.notes)
    if result.pairs:
        yield from _cached_table(result)
    yield from _verdict_tables(result)
    yield from _repeat_tables(result)
    cohorts = cohort_order({name for trace in result.traces.values() for name in trace.cohorts} & set(MAIN))
    for cohort in cohorts:
        yield from _cohort_table(result, cohort, "ttft")
    for metric in _DETAILED:
        if any(getattr(trace.cohorts[cohorts[0]], metric).n for trace in result.traces.values()):
            yield from _cohort_table(result, cohorts[0], metric)
    yield _legend(result), "dim"
    for gate in result.gates:
        style = {"FAILED": "bold red", "passed": "green"}.get(gate.state, "yellow")
        yield f"gate {gate.state}: {gate.expression} ({gate.reason})", style
    for label, slos in result.slos.items():
        for slo, line in zip(slos, slo_lines(slos), strict=True):
            yield f"{label}: {line}", "green" if slo.met else "bold red"
    yield from ((f"next: {step}", "bold") for step in result.next_steps)


def _cached_table(result: Comparison) -> Iterator[tuple[str, str]]:
    rows = []
    for label, pair in result.pairs.items():
        cached = pair.cohorts["all"].cached
        shares = (cached.exact_share, cached.token_error, cached.other_hit_ratio, cached.truth_hit_ratio)
        said = [share(one) for one in shares] if cached.judged else ["not judged", "", "", ""]
        rows.append([f"{label} / {pair.truth}", f"{cached.n:,}", *said])
    headings = ["label / truth", "n", "exact", "token error", "hit ratio", "hit ratio\n(truth)"]
    yield from _table("Cached tokens, request by request", headings, rows)


def _cohort_table(result: Comparison, cohort: str, metric: Metric) -> Iterator[tuple[str, str]]:
    rows = []
    for label, trace in result.traces.items():
        if cohort not in trace.cohorts or (label in result.forecasts and not getattr(trace.cohorts[cohort], metric).n):
            continue  # a forecast has no single gaps
        pair = result.pairs[label].cohorts.get(cohort) if label in result.pairs else None
        errors = None if pair is None else getattr(pair, metric)
        rows.append(_row(label, getattr(trace.cohorts[cohort], metric), errors))
    title = f"{metric.upper()} in ms, {cohort_title(cohort).lower()}"
    yield from _table(title, ["label", "n", "censored", *LEVELS], rows)


def _row(label: str, own: Duration, errors: DurationError | None) -> list[str]:
    values = [quantile_text(getattr(own, level)) for level in LEVELS]
    if errors is not None:
        below = [error_text(getattr(errors, level)) if errors.judged else "not judged" for level in LEVELS]
        values = [f"{value}\n{error}" for value, error in zip(values, below, strict=True)]
    return [label, f"{own.n:,}", share(own.censored_share) if own.censored else "0", *values]


def _legend(result: Comparison) -> str:
    said = ["Errors are (label − truth) / truth."]
    said.append("*: the largest value alone. > x: past the last event.")
    said.append(f"Cells under {result.min_cell} are not judged. Intervals: --json, --html.")
    return " ".join(said)


def _verdict_tables(result: Comparison) -> Iterator[tuple[str, str]]:
    for label, forecast in result.forecasts.items():
        pair = result.pairs[label]
        yield from _verdicts(result, label, pair)
        yield f"{describe_forecast(forecast)}. {_aside(pair, result.min_cell)}", "dim"
        if result.baselines.get(label):
            yield from _baselines(label, pair, result.baselines[label])


def describe_forecast(forecast: Forecast) -> str:
    waits = "later turns wait for responses" if forecast.pacing == "sessions" else "requests at recorded times"
    state = ", saturated" if forecast.saturated else ""
    paced = "" if forecast.pace is None else f", steps at {forecast.pace:.2f} of the model's time"
    return f"{forecast.members} ensemble members, {waits}, utilization {forecast.utilization:.0%}{state}{paced}"


def _verdicts(result: Comparison, label: str, pair: Pair) -> Iterator[tuple[str, str]]:
    rows = []
    for name, errors in _judged(pair).items():
        band = result.traces[label].cohorts[name].ttft
        cells = [
            f"{error_text(getattr(errors, level))}\n{interval_text(getattr(band, level))}" for level in JUDGED_LEVELS
        ]
        rows.append([name, f"{errors.n_truth:,}", *cells, (errors.verdict or "").replace(", ", ",\n")])
    title = f"TTFT of {label} against {pair.truth}: errors, and the forecast's band in ms"
    yield from _table(title, ["cohort", "n", *JUDGED_LEVELS, "verdict"], rows, "<>>>><")


def _repeat_tables(result: Comparison) -> Iterator[tuple[str, str]]:
    """Yield the errors against the mean of the captures, with their interval and the captures' own difference."""
    for label, pair in result.pairs.items():
        if pair.kind == "contrast" and label not in result.forecasts:
            continue
        own = {name: cohort.ttft for name, cohort in counted_cohorts(pair.cohorts).items()}
        cells = {name: [getattr(cell, level) for level in JUDGED_LEVELS] for name, cell in own.items()}
        captures = max((one.captures for row in cells.values() for one in row if one is not None), default=1)
        if captures > 1:
            rows = [[name, *map(repeat_text, row)] for name, row in cells.items()]
            title = f"TTFT of {label} against the mean of {captures} captures: error, its interval, A/A"
            yield from _table(title, ["cohort", *JUDGED_LEVELS], rows)


def repeat_text(error: QuantileError | None) -> str:
    """Return the error against the mean of the captures, its interval and the A/A difference, a line each."""
    if error is None or error.repeat_error is None or error.repeat_low is None or error.repeat_high is None:
        return NOTHING
    ends = f"{signed_percent(error.repeat_low)} … {signed_percent(error.repeat_high)}"
    return f"{signed_percent(error.repeat_error)}\n{ends}\nA/A {share(error.repeat_spread or 0.0)}"


def _judged(pair: Pair) -> dict[str, DurationError]:
    cells = {name: pair.cohorts[name].ttft for name in cohort_order(set(pair.cohorts))}
    return {name: cell for name, cell in cells.items() if cell.judged}


def _aside(pair: Pair, min_cell: int) -> str:
    said = []
    if pair.coverage is not None and pair.coverage.share is not None:
        undecided = f", {pair.coverage.undecided} undecided" if pair.coverage.undecided else ""
        said.append(f"Bands hold {pair.coverage.inside} of {pair.coverage.quantiles} captured quantiles{undecided}.")
    small = unjudged(pair)
    if small:
        said.append(f"Not judged under {min_cell}: {small}.")
    return " ".join(said)


def unjudged(pair: Pair) -> str:
    cells = {name: pair.cohorts[name].ttft for name in cohort_order(set(pair.cohorts))}
    return ", ".join(f"{name} {cell.n_truth:,}" for name, cell in cells.items() if not cell.judged)


def _baselines(
    label: str, pair: Pair, baselines: Mapping[str, Mapping[str, DurationError]]
) -> Iterator[tuple[str, str]]:
    own = counted_cohorts(pair.cohorts)
    rows = []
    for name, by in baselines.items():
        found = [closer(cohort.ttft, by.get(cohort_name)) for cohort_name, cohort in own.items()]
        asked = [[one[measure] for one in found if measure in one] for measure in MEASURES]
        rows.append([name.replace("_", " "), *(f"{sum(won)} of {len(won)}" if won else NOTHING for won in asked)])
    title = f"Cohorts in which {label} is closer than simpler predictors"
    yield from _table(title, ["predictor", *JUDGED_LEVELS, "curve (W1)", "per request"], rows)


def per_request(cell: DurationError | None) -> str:
    if cell is None or cell.median_abs_error is None:
        return NOTHING
    return f"{share(cell.median_abs_error)}; {cell.w1_log:.2f}"


def _table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], align: str = "<"
) -> Iterator[tuple[str, str]]:
    """A titled table; cells may have several lines, and long labels are folded."""
    yield title, "bold"
    folded = [["\n".join(wrap(row[0], _WIDEST_LABEL)), *row[1:]] for row in (headings, *rows)]
    lines = [line for row in folded for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue="")]
    yield "\n".join(table_lines((), lines, align)), ""


def quantile_text(found: Quantile) -> str:
    """Return the value, or ``> x`` past the end of what was seen, or a dash."""
    if found.value_ms is not None:
        return duration_ms(found.value_ms) + ("*" if found.thin else "")
    return f"> {duration_ms(found.beyond_ms)}" if found.beyond_ms is not None else NOTHING


def interval_text(found: Quantile) -> str:
    """Return the interval in ms, open above where it is; empty if there is none."""
    if found.low_ms is None:
        return ""
    high = duration_ms(found.high_ms) if found.high_ms is not None else "∞"
    return f"{duration_ms(found.low_ms)}–{high}"


def error_text(found: QuantileError | None) -> str:
    """Return the signed error, or which sides reach the quantile."""
    return NOTHING if found is None else reached_text(found)


def error_interval_text(found: QuantileError | None) -> str:
    """Return the interval of the signed error; its ends carry signs, so ``…`` separates them."""
    if found is None or found.low is None:
        return ""
    return f"{signed_percent(found.low)} … {signed_percent(found.high) if found.high is not None else '∞'}"
