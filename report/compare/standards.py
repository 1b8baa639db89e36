"""What a forecast is held to unless it is told otherwise: gates over all judged cohorts of an ensemble."""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from measure.cohorts import ALL
from measure.wording import share
from report.compare.results import Comparison, DurationError, Forecast, GateResult, Pair
from report.compare.verdicts import counted_cohorts

BELOW_SATURATION: Final[Mapping[str, float]] = {"p50": 0.05, "p90": 0.10, "p99": 0.15}
"""Largest |error| of TTFT's quantiles in the middle cohort."""
IN_SATURATION: Final[Mapping[str, float]] = {"p50": 0.15}
"""In saturation a small error of the rate is a large one of the line, and only the middle is asked for."""
LEAST_EXACT: Final = 0.99
"""Share of requests whose cached tokens must be equal, where nobody is preempted."""
LEAST_COVERAGE: Final = 0.85
"""Share of captured quantiles inside the bands, which are made to hold 90 %."""
BASELINE_CELL: Final = 100
"""Requests from which on a cohort must beat every baseline."""


def standard_gates(result: Comparison) -> Iterator[GateResult]:
    """Of every ensemble; the baselines' of those judged by the first label."""
    first = next(iter(result.traces))
    for label, forecast in result.forecasts.items():
        pair = result.pairs[label]
        yield from _cached(label, pair, forecast, result.min_cell)
        yield from _quantiles(label, pair, forecast)
        yield _coverage(label, pair)
        if result.baselines and pair.truth == first:
            yield _beaten(label, pair, result.baselines)


def _cached(label: str, pair: Pair, forecast: Forecast, min_cell: int) -> Iterator[GateResult]:
    cached = pair.cohorts[ALL].cached
    expression = f"{label}: cached tokens equal >= {share(LEAST_EXACT)}"
    if cached.exact_share is not None and forecast.preempted:
        yield GateResult(
            expression=expression,
            value=cached.exact_share,
            passed=True,
            reason=f"not asked: {forecast.preempted:,} requests are preempted",
        )
    elif cached.exact_share is not None:
        yield _held(expression, cached.exact_share, cached.exact_share >= LEAST_EXACT, f"{cached.n:,} requests")
    elif cached.n:
        yield _not_judged(expression, f"{cached.n} requests report them; {min_cell} are needed")


def _quantiles(label: str, pair: Pair, forecast: Forecast) -> Iterator[GateResult]:
    for level, limit in (IN_SATURATION if forecast.saturated else BELOW_SATURATION).items():
        expression = f"{label}: TTFT {level} within {share(limit)} or A/A, middle cohort"
        errors = [
            0.0 if error.inside_aa else error.error
            for cohort in counted_cohorts(pair.cohorts).values()
            if (error := getattr(cohort.ttft, level)) is not None
        ]
        if not errors:
            yield _not_judged(expression, "no cohort has enough requests")
            continue
        middle = float(np.quantile(errors, 0.5, method="inverted_cdf"))
        where = "in saturation" if forecast.saturated else "below saturation"
        yield _held(expression, middle, middle <= limit, f"{len(errors)} cohorts, {where}")


def _coverage(label: str, pair: Pair) -> GateResult:
    expression = f"{label}: bands hold >= {share(LEAST_COVERAGE)} of quantiles"
    found = pair.coverage
    if found is None or found.share is None:
        return _not_judged(expression, "no cohort has enough requests")
    return _held(expression, found.share, found.share >= LEAST_COVERAGE, f"{found.inside} of {found.quantiles}")


def _beaten(label: str, pair: Pair, baselines: Mapping[str, Mapping[str, DurationError]]) -> GateResult:
    expression = f"{label}: every baseline beaten per request, cohorts of {BASELINE_CELL} and more"
    cells = {
        name: cell.ttft for name, cell in counted_cohorts(pair.cohorts).items() if cell.ttft.joined >= BASELINE_CELL
    }
    if not cells:
        return GateResult(expression=expression, value=None, passed=True, reason="not asked: no cohort is so large")
    lost = [
        f"{name} by {baseline.replace('_', ' ')}"
        for name, own in cells.items()
        for baseline, cohorts in baselines.items()
        if _beats(cohorts.get(name), own)
    ]
    said = f"not in {', '.join(lost)}" if lost else f"in {len(cells)} of {len(cells)}"
    return GateResult(expression=expression, value=not lost, passed=not lost, reason=said)


def _beats(baseline: DurationError | None, own: DurationError) -> bool:
    theirs = None if baseline is None else baseline.median_abs_error
    return theirs is not None and own.median_abs_error is not None and theirs <= own.median_abs_error


def _held(expression: str, value: float, passed: bool, of: str) -> GateResult:
    return GateResult(expression=expression, value=value, passed=passed, reason=f"{share(value)}, {of}")


def _not_judged(expression: str, reason: str) -> GateResult:
    return GateResult(expression=expression, value=None, passed=False, reason=f"not judged: {reason}")
