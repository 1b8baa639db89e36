"""A forecast's verdicts as tables for a terminal: cohort by cohort, and beside what needs no simulator."""

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from measure.cohorts import cohort_order
from measure.wording import share
from report.compare.celltext import error_text, interval_text
from report.compare.results import Comparison, Duration, DurationError, Forecast, Pair
from report.compare.verdicts import JUDGED_LEVELS


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
