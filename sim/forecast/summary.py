"""Summary of a load's forecast, by member: TTFT quantiles by cohort, the engine's numbers, survival curves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from measure.cohorts import ALL, FIRST_TURN, LATER_TURNS
from measure.survival import CENSORED, EVENT, FAILED, Waits, incidence, make_waits, quantiles, survival_at
from report.pages.whatif import LEVELS, Curve, Span, ttft
from sim.forecast.ensemble import Forecast, interval
from sim.forecast.saturation import Demand, PointRun, demand_of, run_point
from sim.forecast.scenarios import Load
from sim.kernels import layout
from sim.latency.modelfile import Model
from tracefile import Record
from tracefile.records.arrays import FloatArray, IntArray

POINTS = 160
"""Of a survival curve."""


def cohorts_of(records: Sequence[Record]) -> dict[str, IntArray]:
    """Return places of all requests, of first turns and of later ones; the last two where the trace knows turns."""
    turns = np.array([record.turn or 0 for record in records])
    found = {
        ALL: np.arange(len(records)),
        FIRST_TURN: np.flatnonzero(turns == 1),
        LATER_TURNS: np.flatnonzero(turns > 1),
    }
    return {name: places for name, places in found.items() if len(places)}


def first_token_waits(found: Forecast, member: int, places: IntArray) -> Waits:
    """TTFT of a member's requests, each waited for to its end."""
    arrival_ms, ttft_ms, e2e_ms = (part[member, places] for part in (found.arrival_ms, found.ttft_ms, found.e2e_ms))
    came = ~np.isnan(ttft_ms)
    gave_up = ~came & (found.outcome[member, places] == layout.ABORTED)
    end = np.where(came, EVENT, np.where(gave_up, CENSORED, FAILED)).astype(np.int8)
    time_ms = np.where(came, ttft_ms, e2e_ms)
    tells = ~np.isnan(arrival_ms) & ~np.isnan(time_ms)
    return make_waits(time_ms[tells], end[tells], places[tells])


@dataclass(frozen=True, slots=True)
class TtftQuantiles:
    """TTFT quantiles of a member's requests."""

    waits: Waits
    values_ms: FloatArray
    """By level; infinite where fewer requests than that had their first token by the horizon: in a line that grows the
    rest of the curve depends on how long the run is."""
    so_far_ms: FloatArray
    """By level: what is surely exceeded where the value is infinite, the quantile of the waits up to the horizon."""
    until_ms: float


def ttft_quantiles(
    found: Forecast, member: int, places: IntArray, levels: FloatArray, horizon_ms: float = np.inf
) -> TtftQuantiles:
    """Return TTFT quantiles that do not depend on events after ``horizon_ms``."""
    waits = first_token_waits(found, member, places)
    share = incidence(waits)
    values_ms = quantiles(waits, share, levels)
    left_ms = np.maximum(horizon_ms - found.arrival_ms[member, waits.row], 0.0)
    came = (waits.end == EVENT) & (waits.time_ms <= left_ms)
    so_far_ms = np.quantile(np.minimum(waits.time_ms, left_ms), levels, method="inverted_cdf") if len(waits) else levels
    events_ms = waits.time_ms[waits.end == EVENT]
    until_ms = float(events_ms[-1]) if len(events_ms) else 0.0
    if np.isfinite(horizon_ms) and len(waits):
        told = float(came.mean())
        values_ms = np.where(levels <= told, values_ms, np.inf)
        until_ms = min(until_ms, float(quantiles(waits, share, np.array([told]))[0]))
    return TtftQuantiles(waits, values_ms, so_far_ms, until_ms)


@dataclass(frozen=True, slots=True)
class ForecastSummary:
    """A scenario with all that is known of it: values by member."""

    load: Load
    demand: Demand
    run: PointRun
    values: dict[str, FloatArray]
    beyond: dict[str, float]
    """Of values that may be infinite: what they exceed."""
    curves: dict[str, Curve]


def summarize(
    load: Load, found: Forecast, model: Model, cohorts: Mapping[str, IntArray], *, paced: bool
) -> ForecastSummary:
    """Summarize a load's forecast; of a growing queue, only numbers that do not depend on the run's end."""
    point = run_point(load.arrivals, load.engine, model)
    demand = demand_of(point, load.arrivals, load.engine, model)
    horizon_ms = load.horizon_ms if demand.is_saturated and not paced else np.inf
    values, beyond, curves = _engine_values(found), {}, {}
    levels = np.array(list(LEVELS.values()))
    for cohort, places in cohorts.items():
        by_member = [ttft_quantiles(found, member, places, levels, horizon_ms) for member in range(found.members)]
        for number, level in enumerate(LEVELS):
            name = ttft(cohort, level)
            values[name] = np.array([one.values_ms[number] for one in by_member])
            beyond[name] = float(np.median([one.so_far_ms[number] for one in by_member]))
        curves[cohort] = _curve(by_member, stops=bool(np.isfinite(horizon_ms)))
    return ForecastSummary(load, demand, point, values, beyond, curves)


def _curve(by_member: Sequence[TtftQuantiles], *, stops: bool) -> Curve:
    waits, last_ms = [one.waits for one in by_member], float(np.median([one.until_ms for one in by_member]))
    first_ms = max(min(float(one.time_ms[0]) if len(one) else 1.0 for one in waits), 1e-3)
    grid_ms = np.geomspace(first_ms, max(last_ms, first_ms), POINTS)
    waiting = np.array([survival_at(one, incidence(one), grid_ms) for one in waits])
    bands = [interval(column) for column in waiting.T]
    return Curve(
        time_ms=[round(time_ms, 3) for time_ms in grid_ms.tolist()],
        middle=[round(band.middle, 5) for band in bands],
        low=[round(band.low, 5) for band in bands],
        high=[round(band.high, 5) for band in bands],
        stops=stops and bands[-1].high > 0.0,
    )


def hit_rates(found: Forecast) -> FloatArray:
    prompts = found.arrivals.prompt_tokens
    admitted = found.cached_tokens >= 0
    looked_up, hit = (admitted * prompts).sum(axis=1), np.where(admitted, found.cached_tokens, 0).sum(axis=1)
    return np.asarray(hit / np.maximum(looked_up, 1))


def _engine_values(found: Forecast) -> dict[str, FloatArray]:
    ends_ms = found.arrival_ms + found.e2e_ms
    seconds = (np.nanmax(ends_ms, axis=1) - np.nanmin(found.arrival_ms, axis=1)) / 1e3
    served = (found.outcome == layout.OK).sum(axis=1)
    values = {
        "hit_rate": hit_rates(found),
        "requests_per_s": served / seconds,
        "output_tokens_per_s": found.output_tokens.sum(axis=1) / seconds,
        "preemptions": found.preemptions.sum(axis=1).astype(np.float64),
        "unserved": np.isin(found.outcome, (layout.UNSERVABLE, layout.PARENT_FAILED)).sum(axis=1).astype(np.float64),
    }
    levels = list(LEVELS.values())
    for name, rows in (("queue", list(found.queue_ms)), ("itl", found.gaps_ms), ("e2e", list(found.e2e_ms))):
        at_levels = np.array([order_statistics(row, levels) for row in rows])
        values |= {f"{name}.{level}": column for level, column in zip(LEVELS, at_levels.T, strict=True)}
    return values


def order_statistics(values: FloatArray, levels: Sequence[float]) -> FloatArray:
    """Return the values at ``levels``, NaN values left out; NaN of none."""
    known = values[~np.isnan(values)]
    return np.quantile(known, levels, method="inverted_cdf") if len(known) else np.full(len(levels), np.nan)


def span_of(values: FloatArray, beyond: float | None) -> Span:
    """Return the members' values as a span; ``beyond``: the lower bound to write past the end of a curve."""
    found = interval(values)
    return Span(
        middle=finite(found.middle),
        low=finite(found.low),
        high=finite(found.high),
        beyond=beyond if found.middle == np.inf else None,
    )


def finite(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None
