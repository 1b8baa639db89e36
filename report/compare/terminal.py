"""The comparison as tables for a terminal: 80 columns, readable when piped."""

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from measure.cohorts import MAIN, cohort_order, cohort_title
from measure.wording import share
from report.compare.celltext import error_text, quantile_text
from report.compare.results import LEVELS, Comparison, LabelCohort, Metric, PairCohort
from report.compare.verdicttable import verdict_tables

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
