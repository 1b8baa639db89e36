"""Summary of a forecast or measured load: TTFT quantiles by cohort, throughput, hit rate, survival curves."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from measure import latency_samples
from measure.cohorts import ALL, FIRST_TURN, LATER_TURNS
from measure.runs import UNKNOWN, Run, make_run
from measure.survival import (
    CENSORED,
    EVENT,
    FAILED,
    LatencySample,
    incidence,
    latency_sample,
    quantiles,
    survival_at,
)
from report.grid.points import LEVELS, Measure, Span
from sim.engine.simulatedrequest import ABORTED, LOST, NO_ENGINE, PARENT_FAILED, UNSERVABLE
from sim.forecast.captured import Captured
from sim.forecast.ensemble import Forecast, interval
from sim.forecast.limits import ttft
from sim.forecast.results import Curve, ForecastPoint
from sim.latency.verdicts import Trust, trust
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.schema import Record

_UNSERVED = (UNSERVABLE, PARENT_FAILED, LOST, NO_ENGINE)
POINTS = 160
"""Points of a survival curve."""


def cohorts_of(records: Sequence[Record]) -> dict[str, IntArray]:
    turns = np.array([record.turn or 0 for record in records])
    indexes = {
        ALL: np.arange(len(records)),
        FIRST_TURN: np.flatnonzero(turns == 1),
        LATER_TURNS: np.flatnonzero(turns > 1),
    }
    return {name: rows for name, rows in indexes.items() if len(rows)}


def ttft_sample(forecast: Forecast, member: int, rows: IntArray) -> LatencySample:
    """Return TTFTs of a member's requests; aborted requests are censored."""
    arrival_ms, ttft_ms, e2e_ms = (
        column[member, rows] for column in (forecast.arrival_ms, forecast.ttft_ms, forecast.e2e_ms)
    )
    has_first_token = ~np.isnan(ttft_ms)
    gave_up = ~has_first_token & (forecast.outcome[member, rows] == ABORTED)
    end = np.where(has_first_token, EVENT, np.where(gave_up, CENSORED, FAILED)).astype(np.int8)
    time_ms = np.where(has_first_token, ttft_ms, e2e_ms)
    complete = ~np.isnan(arrival_ms) & ~np.isnan(time_ms)
    return latency_sample(time_ms[complete], end[complete], rows[complete])


def values_of(forecast: Forecast, samples: Mapping[str, Sequence[LatencySample]]) -> dict[str, FloatArray]:
    """Return latency and engine measures by member; infinite: the quantile is not reached."""
    values = _engine_values(forecast)
    for cohort, by_member in samples.items():
        rows = np.array([quantiles(sample, incidence(sample), np.array([*LEVELS.values()])) for sample in by_member])
        values |= {ttft(cohort, level): column for level, column in zip(LEVELS, rows.T, strict=True)}
    return values


def ttft_samples(forecast: Forecast, cohorts: Mapping[str, IntArray]) -> dict[str, list[LatencySample]]:
    return {
        name: [ttft_sample(forecast, member, rows) for member in range(forecast.members)]
        for name, rows in cohorts.items()
    }


def curve_of(samples: Sequence[LatencySample]) -> Curve:
    """Return the TTFT survival curve of members, up to the median member's last first token."""
    last_ms = float(np.median([max(sample.time_ms[sample.end == EVENT], default=0.0) for sample in samples]))
    first_ms = max(min(float(sample.time_ms[0]) if len(sample) else 1.0 for sample in samples), 1e-3)
    grid_ms = np.geomspace(first_ms, max(last_ms, first_ms), POINTS)
    waiting = np.array([survival_at(sample, incidence(sample), grid_ms) for sample in samples])
    middle, low, high = np.round([interval(column) for column in waiting.T], 5).T.tolist()
    return Curve(
        time_ms=[round(time_ms, 3) for time_ms in grid_ms.tolist()],
        survival=middle,
        low=low,
        high=high,
    )


def hit_rates(forecast: Forecast) -> FloatArray:
    prompts = forecast.arrivals.prompt_tokens
    admitted = forecast.cached_tokens >= 0
    looked_up, hit = (admitted * prompts).sum(axis=1), np.where(admitted, forecast.cached_tokens, 0).sum(axis=1)
    return np.asarray(hit / np.maximum(looked_up, 1))


def _engine_values(forecast: Forecast) -> dict[str, FloatArray]:
    ends_ms = forecast.arrival_ms + forecast.e2e_ms
    seconds = (np.nanmax(ends_ms, axis=1) - np.nanmin(forecast.arrival_ms, axis=1)) / 1e3
    values = {
        "hit_rate": hit_rates(forecast),
        "output_tokens_per_s": forecast.output_tokens.sum(axis=1) / seconds,
        "preemptions": forecast.preemptions.sum(axis=1).astype(np.float64),
        "unserved": np.isin(forecast.outcome, _UNSERVED).sum(axis=1).astype(np.float64),
    }
    for name, rows in (("itl", forecast.gaps_ms), ("e2e", list(forecast.e2e_ms))):
        at_levels = np.array([_order_statistics(row) for row in rows])
        values |= {f"{name}.{level}": column for level, column in zip(LEVELS, at_levels.T, strict=True)}
    return values


def _order_statistics(values: FloatArray) -> FloatArray:
    """Return latency quantiles at ``LEVELS`` without NaN; NaN for no value."""
    finite_values = values[~np.isnan(values)]
    levels = list(LEVELS.values())
    return (
        np.quantile(finite_values, levels, method="inverted_cdf")
        if len(finite_values)
        else np.full(len(levels), np.nan)
    )


def span_of(values: FloatArray) -> Span:
    middle, low, high = map(finite, interval(values))
    return Span(middle=middle, low=low, high=high)


def finite(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None


def measured_point(captured: Captured, cohorts: Mapping[str, IntArray]) -> ForecastPoint | None:
    """Return the measured latency and hit rate of a trace; None: no times, or a simulated trace."""
    run = make_run("measured", captured.path.name, captured.meta, captured.records)
    samples = {name: latency_samples.ttft_sample(run, rows) for name, rows in cohorts.items()}
    samples = {name: sample for name, sample in samples.items() if sample.count(EVENT)}
    if captured.meta.source == "sim" or not (samples or np.isfinite(run.e2e_ms).any()):
        return None
    values = dict(_measured_values(captured, run))
    levels = np.array(list(LEVELS.values()))
    for cohort, sample in samples.items():
        at_levels = quantiles(sample, incidence(sample), levels).tolist()
        values |= {ttft(cohort, level): value for level, value in zip(LEVELS, at_levels, strict=True)}
    spans = {name: span_of(np.array([value])) for name, value in values.items()}
    return ForecastPoint(
        name="measured",
        kind="measured",
        settings={},
        members=1,
        measures={name: Measure(value=span) for name, span in spans.items() if span.middle is not None},
        curves={name: curve_of([sample]) for name, sample in samples.items()},
    )


def _measured_values(captured: Captured, run: Run) -> Iterator[tuple[str, float]]:
    reported = (run.prompt_tokens != UNKNOWN) & (run.cached_tokens != UNKNOWN)
    if reported.any():
        yield "hit_rate", run.cached_tokens[reported].sum() / max(run.prompt_tokens[reported].sum(), 1)
    for name, values in (("itl", run.itl_ms), ("e2e", run.e2e_ms)):
        at_levels = _order_statistics(values).tolist()
        yield from ((f"{name}.{level}", value) for level, value in zip(LEVELS, at_levels, strict=True))
    ends_ms = run.arrival_ms + run.e2e_ms
    if np.isfinite(ends_ms).any():
        seconds = (np.nanmax(ends_ms) - np.nanmin(run.arrival_ms)) / 1e3
        yield "output_tokens_per_s", sum(record.output_tokens or 0 for record in captured.records) / seconds


def measure_beside(name: str, values: Mapping[str, FloatArray], base: Mapping[str, FloatArray] | None) -> Measure:
    """Return a measure with its effect on ``base``: member values of another point."""
    local = values[name]
    if base is None or name not in base:
        return Measure(value=span_of(local))
    before = base[name]
    with np.errstate(invalid="ignore", divide="ignore"):
        difference, ratio = local - before, np.where(before > 0.0, local / before, np.nan)
    return Measure(value=span_of(local), difference=span_of(difference), ratio=span_of(ratio))


def with_errors(point: ForecastPoint, measured: ForecastPoint) -> ForecastPoint:
    measures = dict(point.measures)
    for name, measure in point.measures.items():
        truth, value = measured.middle(name), measure.value
        if truth:
            low, middle, high = (None if end is None else end / truth for end in (value.low, value.middle, value.high))
            measures[name] = Measure(value=value, ratio=Span(middle=middle, low=low, high=high))
    return msgspec.structs.replace(point, measures=measures)


def trust_in(point: ForecastPoint) -> Trust | None:
    """Return the trust in the latency forecast of a capture, by its errors; None: not measured."""
    spans = {level: measure for level in LEVELS if (measure := point.measures[ttft(ALL, level)]).ratio is not None}
    errors = {
        level: cell.ratio.middle - 1.0 for level, cell in spans.items() if cell.ratio and cell.ratio.middle is not None
    }
    bands = {level: _band(measure.value) for level, measure in spans.items()}
    return trust(errors, bands, saturated=point.saturated) if errors else None


def _band(span: Span) -> float:
    if span.middle is None or span.low is None or span.high is None:
        return np.inf
    return (span.high - span.low) / 2.0 / max(span.middle, 1e-9)
