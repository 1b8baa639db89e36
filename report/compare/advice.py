"""Next steps after failed gates: the likely cause of each, as far as the numbers of the comparison show it."""

from collections.abc import Iterator, Sequence
from typing import Final

from measure.wording import listed, share, signed_percent
from report.compare.ensembles import counted_cohorts
from report.compare.gates import BELOW_SATURATION, IN_SATURATION
from report.compare.results import Comparison, Forecast, GateResult, Pair, QuantileError

_SAME_WAY: Final = 0.8
"""Share of the cohorts whose errors have one sign, from which the whole engine is faster or slower."""
_FEWEST_COHORTS: Final = 3
ENOUGH_CAPTURES: Final = 3
"""Captures of one load whose spread tells how well their mean is known."""


def advice(result: Comparison) -> list[str]:
    """Return the next steps, the likeliest cause first; empty where no gate failed."""
    found: list[str] = []
    for label, forecast in result.forecasts.items():
        mark = f"{label}:"
        failed = [gate for gate in result.gates if not gate.passed and gate.expression.startswith(mark)]
        if failed:
            found += _of_forecast(result, label, forecast, failed)
    return list(dict.fromkeys(found))


def _of_forecast(result: Comparison, label: str, forecast: Forecast, failed: Sequence[GateResult]) -> Iterator[str]:
    pair, kinds = result.pairs[label], {gate.name.removeprefix(f"{label}: ") for gate in failed}
    unjudged = [gate.name for gate in failed if gate.value is None]
    if unjudged:
        yield f"{listed(unjudged)}: not judged; capture a longer load, {result.min_cell} requests and more a cohort"
    if "cached tokens" in kinds:
        yield f"cached tokens differ: sim audit {result.traces[pair.truth].file} tells the cause, request by request"
    missed = [level for level in BELOW_SATURATION if f"TTFT {level}" in kinds]
    if missed and "cached tokens" not in kinds:
        yield from _of_latency(result, label, forecast, missed)
    if ("bands" in kinds or missed) and forecast.fitted_captures < 2:
        yield "one capture cannot tell how the engine's speed drifts: fit captures of different hours together"
    if "baselines" in kinds:
        yield "a simpler predictor does better: sim fit --residuals shows where the model's shape is off"


def _of_latency(result: Comparison, label: str, forecast: Forecast, missed: Sequence[str]) -> Iterator[str]:
    pair = result.pairs[label]
    repeats = [one for name in result.repeats if (one := result.pairs[name]).truth == pair.truth]
    limits = IN_SATURATION if forecast.saturated else BELOW_SATURATION
    if forecast.other_settings:
        yield f"the engine is not the fitted one: {listed(forecast.other_settings)}; fit captures of this engine"
    if forecast.beyond_fit:
        yield f"the load is beyond the fitted range: {listed(forecast.beyond_fit)}; fit a capture of such a load too"
    shift = _shift(pair, missed[0])
    if shift is not None:
        way = "slower" if shift < 0.0 else "faster"
        yield (
            f"nearly every cohort was {way} than forecast ({signed_percent(shift)} at {missed[0]} in the middle): the "
            "engine, its machine or their background load changed since the fit; capture and fit again"
        )
    if len(repeats) + 1 < ENOUGH_CAPTURES:
        yield (
            "a noisy machine shows the same: capture this load again, three times in all, and pass it as "
            "--repeat each time; errors are then against the mean of the captures"
        )
    if repeats:
        errors = [error for level in missed for error in _errors(pair, level)]
        apart = max((error.repeat_spread for error in errors if error.repeat_spread is not None), default=0.0)
        if apart > min(limits[level] for level in missed):
            yield f"captures of this load differ by up to {share(apart)}: capture on an idle machine"


def _shift(pair: Pair, level: str) -> float | None:
    """Return the middle signed error if nearly all cohorts err in one direction; None: they do not, or are few."""
    errors = sorted(error.signed_error for error in _errors(pair, level) if error.signed_error is not None)
    slower = sum(error < 0.0 for error in errors)
    if len(errors) < _FEWEST_COHORTS or max(slower, len(errors) - slower) < _SAME_WAY * len(errors):
        return None
    return errors[(len(errors) - 1) // 2]


def _errors(pair: Pair, level: str) -> list[QuantileError]:
    cells = (getattr(cohort.ttft, level) for cohort in counted_cohorts(pair.cohorts).values())
    return [cell for cell in cells if cell is not None]
