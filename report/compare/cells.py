"""Cells of a comparison: a latency metric of a label in a cohort, its curve and quantiles, and pairs of cells.

Captures of one load differ by the engine's pace, so their spread bounds the error of their mean. An error is small
enough if its complete interval lies within a margin; a larger spread of captures widens the interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import expm1, log1p, sqrt
from statistics import mean, stdev
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from measure.latency_samples import distance
from measure.metrics.requests import LEAST_DENOMINATOR
from measure.number_format import listed, share
from measure.quantiles import ROUNDING
from measure.resampling import FEWEST_UNITS, FEWEST_UNITS_ABOVE, effective_units, interval, resample, t_quantile
from measure.runs import Run
from measure.survival import CENSORED, EVENT, FAILED, LatencySample, incidence, quantiles
from measure.thresholds import BELOW_SATURATION, TOO_UNCERTAIN
from report.compare.pairing import Join
from report.compare.results import (
    LEVELS,
    Duration,
    DurationError,
    Metric,
    Quantile,
    QuantileError,
)
from report.pages.figures import Curve
from tracefile.records.arrays import FloatArray, IntArray

MIN_CELL: Final = 30
"""Fewest latencies on each side of a cell for an error between the two."""
LEVEL_SHARES: Final[FloatArray] = np.array(list(LEVELS.values()))
_BULK_POINTS: Final = 240
_TAIL_POINTS: Final = 120


@dataclass(frozen=True, slots=True)
class Cell:
    """A label's sample and what is derived from it; of an ensemble, all ``members`` as one sample (0: a trace)."""

    waits: LatencySample
    sessions: int
    effective_n: float
    """Independent units, of sessions that met in no queue, that tell as much."""
    values_ms: FloatArray
    """Quantiles at LEVELS; infinite past the curve's end."""
    low_ms: FloatArray
    high_ms: FloatArray
    """Interval of each quantile: over resampled sessions, of an ensemble over its members. NaN: none."""
    resampled_ms: FloatArray | None
    """Quantiles (draws, LEVELS) of resampled sessions, of an ensemble of one member after another. Null: too few
    sessions to resample, or a metric without intervals."""
    curve: Curve
    members: int = 0
    members_ms: FloatArray | None = None
    """Quantiles of each member of an ensemble at LEVELS, shape (members, LEVELS); NaN: a member without waits."""

    @property
    def size(self) -> int:
        """Number of waits, on average over the members."""
        return self.count(EVENT) + self.count(FAILED) + self.count(CENSORED)

    def count(self, end: int) -> int:
        return round(self.waits.count(end) / max(1, self.members))


Cells = Mapping[tuple[str, str, Metric], Cell]
"""Latencies by label, cohort and metric."""


def measure(waits: LatencySample, session_of_row: IntArray, weights: npt.NDArray[np.uint16] | None) -> Cell:
    """Return curve, quantiles and bootstrap draws of a latency sample; ``weights`` None: no intervals."""
    if not len(waits):
        return empty_cell(waits)
    units = session_of_row[waits.row]
    sessions, effective_n = len(np.unique(units)), effective_units(units)
    share = incidence(waits)
    values_ms = quantiles(waits, share, LEVEL_SHARES)
    points = plotted_rows(waits)
    resampled_ms = None
    low = high = np.full(len(points), np.nan)
    low_ms = high_ms = np.full(len(LEVEL_SHARES), np.nan)
    if weights is not None and effective_n >= FEWEST_UNITS and len(weights):
        replicates = resample(waits, session_of_row, weights, LEVEL_SHARES, points)
        resampled_ms = replicates.quantiles_ms
        low, high = interval(replicates.survival)
        low_ms, high_ms = interval(resampled_ms)
        indexes = np.searchsorted(share, LEVEL_SHARES - ROUNDING)
        above = [effective_units(units[index + 1 :]) for index in indexes]
        high_ms = np.where(np.array(above) < FEWEST_UNITS_ABOVE, np.inf, high_ms)
    curve = Curve(waits.time_ms[points], 1.0 - share[points], low, high)
    return Cell(waits, sessions, effective_n, values_ms, low_ms, high_ms, resampled_ms, curve)


def empty_cell(waits: LatencySample, members: int = 0) -> Cell:
    nothing, unknown = np.empty(0), np.full(len(LEVEL_SHARES), np.nan)
    curve = Curve(nothing, nothing, nothing, nothing)
    return Cell(waits, 0, 0.0, unknown, unknown, unknown, None, curve, members)


def describe(cell: Cell) -> Duration:
    n, censored = cell.size, cell.count(CENSORED)
    by_level = {
        name: Quantile(
            value_ms=_number(cell.values_ms[at]),
            beyond_ms=cell.waits.last_ms if np.isinf(cell.values_ms[at]) else None,
            low_ms=_number(cell.low_ms[at]),
            high_ms=_number(cell.high_ms[at]),
            thin=n * (1.0 - level) < 1.0 - 1e-9,
        )
        for at, (name, level) in enumerate(LEVELS.items())
    }
    return Duration(
        n=n,
        events=cell.count(EVENT),
        failed=cell.count(FAILED),
        censored=censored,
        censored_share=censored / n if n else 0.0,
        unobserved=round(cell.waits.unobserved / max(1, cell.members)),
        units=cell.sessions,
        effective_n=round(cell.effective_n, 1),
        **by_level,
    )


def evaluate(
    truth: Cell,
    other: Cell,
    per_request: tuple[FloatArray, FloatArray] | None,
    repeats: Sequence[DurationError] = (),
    limits: Mapping[str, float] = BELOW_SATURATION,
) -> DurationError:
    """Compare two latency cells; ``per_request``: the value of each joined request on both sides.

    ``repeats``: the same cell of each repeated capture. ``limits``: gate limits on an ensemble's latency error.
    """
    n_truth, n_other = truth.size, other.size
    if min(n_truth, n_other) < MIN_CELL:
        return DurationError(n_truth=n_truth, n_other=n_other, evaluated=False)
    errors = {name: _quantile_error(truth, other, at) for at, name in enumerate(LEVELS)}
    apart = distance(truth.waits, other.waits)
    measured = DurationError(
        n_truth=n_truth,
        n_other=n_other,
        evaluated=True,
        w1_ms=apart.w1_ms,
        w1_log=apart.w1_log,
        sup=apart.sup,
    )
    beside = {
        name: error and with_repeats(error, [getattr(repeat, name) for repeat in repeats], is_trace=not other.members)
        for name, error in errors.items()
    }
    measured = msgspec.structs.replace(measured, **beside, verdict=verdict(beside, limits) if other.members else None)
    return _with_requests(measured, *per_request) if per_request is not None else measured


def joined_rows(join: Join, truth_cohort: IntArray, truth: Run) -> tuple[IntArray, IntArray]:
    inside = np.zeros(len(truth), dtype=np.bool_)
    inside[truth_cohort] = True
    mask = inside[join.truth_rows]
    return join.truth_rows[mask], join.other_rows[mask]


def _quantile_error(truth: Cell, other: Cell, at: int) -> QuantileError | None:
    t, o = truth.values_ms[at], other.values_ms[at]
    if np.isnan(t) or np.isnan(o) or t <= LEAST_DENOMINATOR:
        return None
    inside = _inside_band(t, truth, other, at) if other.members else None
    if not (np.isfinite(t) and np.isfinite(o)):
        return QuantileError(reached=_reached(t, o, truth, other), inside_band=inside)
    band = float(other.high_ms[at] - other.low_ms[at]) / (2.0 * float(o)) if other.members and o > 0.0 else None
    low = high = np.full(1, np.nan)
    comparable = all(cell.members or np.isfinite(cell.high_ms[at]) for cell in (truth, other))
    if comparable and truth.resampled_ms is not None and other.resampled_ms is not None:
        truth_draws, other_draws = truth.resampled_ms[:, at], other.resampled_ms[:, at]
        mask = np.isfinite(truth_draws) & ~np.isnan(other_draws) & (truth_draws > LEAST_DENOMINATOR)
        low, high = interval(((other_draws[mask] - truth_draws[mask]) / truth_draws[mask])[:, None])
    signed = float((o - t) / t)
    return QuantileError(
        error=abs(signed),
        signed_error=signed,
        low=_number(low[0]),
        high=_number(high[0]),
        inside_band=inside,
        band=band,
    )


def _reached(t: float, o: float, truth: Cell, other: Cell) -> Literal["one", "neither", "undecided"]:
    """Return which sides reach a quantile that is infinite on a side; a censored curve is a lower bound."""
    if np.isinf(t) and np.isinf(o):
        return "neither"
    bound_ms = (truth if np.isinf(t) else other).waits.observed_until_ms
    return "one" if min(t, o) < bound_ms else "undecided"


def _inside_band(t: float, truth: Cell, other: Cell, at: int) -> bool | None:
    """Return if the reference's latency quantile is in the band; null: undecided, as it only has a lower bound."""
    low, high = other.low_ms[at], other.high_ms[at]
    if np.isfinite(t) or np.isinf(low):
        return bool(low <= t <= high)
    least_ms = truth.waits.observed_until_ms
    if high < least_ms:
        return False
    return True if np.isinf(high) and low <= least_ms else None


def _with_requests(cell: DurationError, truth_ms: FloatArray, other_ms: FloatArray) -> DurationError:
    """Add latency errors per joined request; under MIN_CELL requests, only their number."""
    both = ~np.isnan(truth_ms) & ~np.isnan(other_ms) & (truth_ms > LEAST_DENOMINATOR)
    t, o = truth_ms[both], other_ms[both]
    values: dict[str, float] = {}
    if len(t) >= MIN_CELL:
        values = {
            "median_abs_error_ms": float(np.median(np.abs(o - t))),
            "median_abs_error": float(np.median(np.abs(o - t) / t)),
            "bias_ms": float(np.mean(o - t)),
            "bias": float((o - t).sum() / t.sum()),
        }
    return msgspec.structs.replace(cell, joined=len(t), **values)


def plotted_rows(waits: LatencySample) -> IntArray:
    """Return indexes of sorted latencies to plot: evenly by rank, and denser towards the tail."""
    n = len(waits)
    bulk = np.linspace(0, n - 1, _BULK_POINTS)
    tail = n - np.geomspace(1, n, _TAIL_POINTS)
    points = np.unique(np.concatenate([bulk, tail]).astype(np.int64))
    # A step ends at the last wait that ties, or the curve would be drawn too high there.
    last_of_tie = np.searchsorted(waits.time_ms, waits.time_ms[points], side="right") - 1
    return np.unique(last_of_tie)


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


EVALUATED_LEVELS: Final = ("p50", "p90", "p99")
WITHIN_BAND: Final = "within band"


def verdict(errors: Mapping[str, QuantileError | None], limits: Mapping[str, float] = BELOW_SATURATION) -> str:
    """Return the verdict on latency at p50, p90 and p99: within band, largest error outside, or too uncertain.

    A band wider than a gate's limit decides nothing, however small the error of the median.
    """
    comparable = {level: error for level in EVALUATED_LEVELS if (error := errors[level]) is not None}
    if not comparable:
        return "not comparable"
    outside = {level: error for level, error in comparable.items() if error.inside_band is False}
    if outside:
        unreached = [level for level, error in outside.items() if error.error is None]
        if unreached:
            return f"off, {listed(unreached)} on one side"
        return f"off by {share(max(gated_error(error) for error in outside.values()))}"
    wide = {level: error.band for level, error in comparable.items() if (error.band or 0.0) > limits.get(level, np.inf)}
    if wide:
        level = max(wide, key=lambda name: wide[name] or 0.0)
        return f"{TOO_UNCERTAIN}, {band_text(wide[level])} at {level}"
    undecided = [level for level, error in comparable.items() if error.inside_band is None]
    return WITHIN_BAND if not undecided else f"{WITHIN_BAND}, {listed(undecided)} undecided"


def band_text(band: float | None) -> str:
    return "band open above" if band is None or np.isinf(band) else f"band ± {share(band)}"


def gated_error(error: QuantileError) -> float:
    """Return |latency error|, against the mean of repeated captures if any; infinite without bound."""
    signed = error.signed_error if error.repeat_error is None else error.repeat_error
    return float("inf") if signed is None else abs(signed)


def with_repeats(error: QuantileError, again: Sequence[QuantileError | None], *, is_trace: bool) -> QuantileError:
    """Add the latency error against the mean of the captures, its interval, the spread, and the equivalence.

    ``again``: error of each repeat against the reference. ``is_trace``: a measured run, which differs from the mean as
    a capture does; the middle of an ensemble is a number.
    """
    repeats = [repeat.signed_error for repeat in again if repeat is not None and repeat.signed_error is not None]
    if error.signed_error is None or not repeats:
        return _with_equivalence(error, error.low, error.high)
    logs = [0.0, *map(log1p, repeats)]
    apart = log1p(error.signed_error) - mean(logs)
    half = t_quantile(len(logs) - 1) * stdev(logs) * sqrt(1.0 / len(logs) + is_trace)
    result = msgspec.structs.replace(
        error,
        repeat_error=expm1(apart),
        repeat_low=expm1(apart - half),
        repeat_high=expm1(apart + half),
        captures=len(logs),
        repeat_spread=expm1(max(logs) - min(logs)),
    )
    return _with_equivalence(result, result.repeat_low, result.repeat_high)


def _with_equivalence(error: QuantileError, low: float | None, high: float | None) -> QuantileError:
    if low is None or high is None:
        return error
    return msgspec.structs.replace(error, equivalence=max(abs(low), abs(high)))


def mean_of_captures(truth_ms: float, error: QuantileError) -> float:
    """Return the mean over captures of a latency quantile that is ``truth_ms`` in the reference."""
    if error.repeat_error is None or error.signed_error is None:
        return truth_ms
    return truth_ms * (1.0 + error.signed_error) / (1.0 + error.repeat_error)


def shrinkage(captures: int, fitted: int) -> float:
    """Return by how much less the mean of ``captures`` differs from the fitted mean than a single capture does."""
    comparable = 1.0 / max(fitted, 1)
    return sqrt((1.0 / captures + comparable) / (1.0 + comparable))
