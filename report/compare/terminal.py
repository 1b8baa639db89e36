"""The comparison as tables for a terminal: 80 columns, readable when piped."""

from collections.abc import Iterator, Mapping

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from measure.cohorts import MAIN, cohort_order, cohort_title
from measure.wording import share
from report.compare.cells import JUDGED_LEVELS
from report.compare.celltext import error_text, interval_text, quantile_text
from report.compare.results import (
    LEVELS,
    Comparison,
    Duration,
    DurationError,
    Forecast,
    LabelCohort,
    Metric,
    Pair,
    PairCohort,
)

_DETAILED: tuple[Metric, ...] = ("tpot", "itl", "e2e")


def print_comparison(result: Comparison, console: Console) -> None:
    """Headline, notes, cached tokens, then a table per cohort, then gates."""
    for part in _parts(result):
        console.print(part)


def _parts(result: Comparison) -> Iterator[RenderableType]:
    for sentence in result.headline:
        yield Text(sentence, style="bold")
    for note in result.notes:
        yield Text(f"note: {note}", style="yellow")
    if result.pairs:
        yield _cached_table(result)
    yield from verdict_tables(result)
    cohorts = {name for trace in result.traces.values() for name in trace.cohorts}
    for cohort in cohort_order(cohorts & set(MAIN)):
        yield _cohort_table(result, cohort, "ttft")
    telling = cohort_order(cohorts & set(MAIN))[0]
    for metric in _DETAILED:
        if any(getattr(trace.cohorts[telling], metric).n for trace in result.traces.values()):
            yield _cohort_table(result, telling, metric)
    yield Text(_legend(result), style="dim")
    for gate in result.gates:
        yield Text(
            f"gate {'passed' if gate.passed else 'FAILED'}: {gate.expression} ({gate.reason})",
            style="green" if gate.passed else "bold red",
        )


def _cached_table(result: Comparison) -> Table:
    table = _table("Cached tokens, request by request")
    table.add_column("label / truth", overflow="fold")
    for heading in ("n", "equal", "token error", "hit ratio", "of truth"):
        table.add_column(heading, justify="right", no_wrap=True)
    for label, pair in result.pairs.items():
        cached = pair.cohorts["all"].cached
        if not cached.judged:
            table.add_row(f"{label} / {pair.truth}", f"{cached.n:,}", "not judged", "", "", "")
            continue
        table.add_row(
            f"{label} / {pair.truth}",
            f"{cached.n:,}",
            share(cached.exact_share),
            share(cached.token_error),
            share(cached.other_hit_ratio),
            share(cached.truth_hit_ratio),
        )
    return table


def _cohort_table(result: Comparison, cohort: str, metric: Metric) -> Table:
    table = _table(f"{metric.upper()} in ms, {cohort_title(cohort).lower()}")
    table.add_column("label", overflow="fold", max_width=20)
    for heading in ("n", "cens."):
        table.add_column(heading, justify="right", no_wrap=True)
    for level in LEVELS:
        table.add_column(level, justify="right", no_wrap=True)
    for label, trace in result.traces.items():
        if cohort not in trace.cohorts or (label in result.forecasts and not getattr(trace.cohorts[cohort], metric).n):
            continue  # a forecast has no single gaps
        pair = result.pairs[label].cohorts.get(cohort) if label in result.pairs else None
        table.add_row(*_row(label, trace.cohorts[cohort], pair, metric))
    return table


def _row(label: str, own: LabelCohort, pair: PairCohort | None, metric: Metric) -> list[str]:
    """A label's quantiles, each with its error below it where there is a truth."""
    duration = getattr(own, metric)
    values = [quantile_text(getattr(duration, level)) for level in LEVELS]
    if pair is not None:
        errors = getattr(pair, metric)
        below = (
            [error_text(getattr(errors, level)) for level in LEVELS] if errors.judged else ["not judged"] * len(LEVELS)
        )
        values = [f"{value}\n{error}" for value, error in zip(values, below, strict=True)]
    return [label, f"{duration.n:,}", share(duration.censored_share) if duration.censored else "0", *values]


def _legend(result: Comparison) -> str:
    said = ["Errors are (label − truth) / truth."]
    if result.yardstick is not None:
        said.append(f"≈: no further off than the A/A run ({result.yardstick}).")
    said.append("*: the largest value alone. > x: past the last event.")
    said.append(f"Cells under {result.min_cell} are not judged. Intervals: --json, -o.")
    return " ".join(said)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))


def verdict_tables(result: Comparison) -> Iterator[RenderableType]:
    """Of every ensemble, in the order of the labels."""
    first = next(iter(result.traces))
    for label, forecast in result.forecasts.items():
        pair = result.pairs[label]
        yield _verdicts(result, label, pair)
        yield Text(f"{describe_forecast(forecast)}. {_aside(pair, result.min_cell)}", style="dim")
        if result.baselines and pair.truth == first:
            yield _baselines(label, pair, result.baselines)


def describe_forecast(forecast: Forecast) -> str:
    """How it was made, in a line."""
    waits = "later turns wait for answers" if forecast.pacing == "sessions" else "requests at recorded times"
    state = ", saturated" if forecast.saturated else ""
    return f"{forecast.members} futures, {waits}, load {forecast.load:.2f} of what the engine can do{state}"


def _verdicts(result: Comparison, label: str, pair: Pair) -> Table:
    table = _table(f"TTFT of {label} against {pair.truth}: errors, and the forecast's band in ms")
    table.add_column("cohort", overflow="fold")
    for heading in ("n", *JUDGED_LEVELS):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for name in cohort_order(set(pair.cohorts)):
        errors = pair.cohorts[name].ttft
        if errors.judged:
            band = result.traces[label].cohorts[name].ttft
            cells = [_error_and_band(errors, band, level) for level in JUDGED_LEVELS]
            table.add_row(name, f"{errors.n_truth:,}", *cells, errors.verdict)
    return table


def _error_and_band(errors: DurationError, band: Duration, level: str) -> str:
    return f"{error_text(getattr(errors, level))}\n{interval_text(getattr(band, level))}"


def _aside(pair: Pair, min_cell: int) -> str:
    said = []
    if pair.coverage is not None and pair.coverage.share is not None:
        said.append(f"Bands hold {pair.coverage.inside} of {pair.coverage.quantiles} captured quantiles.")
    small = unjudged(pair)
    if small:
        said.append(f"Not judged under {min_cell}: {small}.")
    return " ".join(said)


def unjudged(pair: Pair) -> str:
    """Cohorts that are too small, each with its requests."""
    cells = {name: pair.cohorts[name].ttft for name in cohort_order(set(pair.cohorts))}
    return ", ".join(f"{name} {cell.n_truth:,}" for name, cell in cells.items() if not cell.judged)


def _baselines(label: str, pair: Pair, baselines: Mapping[str, Mapping[str, DurationError]]) -> Table:
    table = _table("Median |error| of a request's TTFT; W1 on ln TTFT")
    table.add_column("cohort", overflow="fold")
    table.add_column("n", justify="right")
    for heading in (label, *(name.replace("_", " ") for name in baselines)):
        table.add_column(heading, justify="right", max_width=17)
    for name in cohort_order(set(pair.cohorts)):
        own = pair.cohorts[name].ttft
        if own.judged:
            cells = [per_request(cohorts.get(name)) for cohorts in ({name: own}, *baselines.values())]
            table.add_row(name, f"{own.joined:,}", *cells)
    return table


def per_request(cell: DurationError | None) -> str:
    """Median |error| of a request, and W1 on ln TTFT."""
    if cell is None or cell.median_abs_error is None:
        return "–"
    return f"{share(cell.median_abs_error)}; {cell.w1_log:.2f}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
