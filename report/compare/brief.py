"""TTFT of forecasts beside captures, in the few lines that fit on one screen of a terminal."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from measure.cohorts import ALL, cohort_title
from measure.number_format import NOTHING, share
from measure.table import table_lines
from measure.thresholds import TOO_UNCERTAIN
from report.compare.cells import EVALUATED_LEVELS
from report.compare.comparison import Compared
from report.compare.headline import telling_cohort
from report.compare.panels import error_interval_text, interval_text, quantile_error, quantile_text
from report.compare.results import Comparison, QuantileError
from report.pages.panels import Row, Table, wrap_lines

_MOST_CAPTURES: Final = 7
"""Rows of the table of validations."""
_STATES: Final = ("FAILED", TOO_UNCERTAIN, "passed")


def brief_tables(result: Comparison) -> list[Table]:
    return [_forecast_table(result, label) for label, forecast in result.forecasts.items() if forecast.pace is None]


def _forecast_table(result: Comparison, label: str) -> Table:
    """Return captured and forecast TTFT quantiles with band, error and interval, in the first cohort shown."""
    pair = result.pairs[label]
    name = telling_cohort(pair)
    captured, predicted = (result.traces[side].cohorts[name].ttft for side in (pair.truth, label))
    rows: list[Row] = []
    for level in EVALUATED_LEVELS:
        error: QuantileError | None = getattr(pair.cohorts[name].ttft, level)
        forecast = getattr(predicted, level)
        spread = NOTHING if error is None or error.repeat_spread is None else share(error.repeat_spread)
        quantiles = [quantile_text(getattr(captured, level)), quantile_text(forecast), interval_text(forecast)]
        rows.append([level, *quantiles, quantile_error(error), error_interval_text(error) or NOTHING, spread])
    confidence = f"{result.confidence * 100:.0f} %"
    columns = ["quantile", f"{pair.truth} ms", f"{label} ms", f"{confidence} band ms"]
    columns += ["error", f"{confidence} interval", "repeats differ"]
    return Table(columns, rows, f"TTFT, {cohort_title(name).lower()}, {captured.n:,} requests")


def validation_lines(results: Mapping[str, Compared], label: str) -> Iterator[str]:
    """Yield a row per capture: gates, TTFT errors with interval; then the first next step."""
    rows, steps = [], []
    for path, compared in results.items():
        states = Counter(gate.state for gate in compared.result.gates)
        state = next((state for state in _STATES if states[state]), "passed")
        gates = f"{states['passed']}/{sum(states.values())}"
        ttft = compared.result.pairs[label].cohorts[ALL].ttft
        errors = [_error_text(getattr(ttft, level)) for level in EVALUATED_LEVELS]
        rows.append([_capture_name(path), state, gates, *errors])
        steps += compared.result.next_steps
    columns = ["validated on", "verdict", "passed", *(f"TTFT {level} error" for level in EVALUATED_LEVELS)]
    yield from table_lines(columns, sorted(rows, key=lambda row: _STATES.index(row[1]))[:_MOST_CAPTURES], "<<>>>>")
    yield from wrap_lines([*(f"next: {step}" for step in steps[:1]), "more: -v prints all gates and tables"])


def _capture_name(path: str) -> str:
    return Path(path).name.partition(".")[0][:24]


def _error_text(error: QuantileError | None) -> str:
    """Return a signed latency error and its interval: ``−12 % [−22–+5.2 %]``."""
    ends = error_interval_text(error).replace(" %", "", 1).replace(" … ", "–")
    return quantile_error(error) + (f" [{ends}]" if ends else "")
