"""Measured numbers of a captured load, under the names of a forecast's, and a forecast's errors against them."""

from collections.abc import Iterator, Mapping

import numpy as np

from measure.runs import STATUSES, UNKNOWN, Run, make_run
from measure.survival import EVENT, Waits, incidence, quantiles, survival_at
from measure.waits import first_token_waits
from measure.wording import listed, signed_percent
from report.compare.gates import BELOW_SATURATION, IN_SATURATION
from report.pages.whatif import LEVELS, MEASURED, Curve, Measure, Row, Span, ttft
from sim.forecast.scenarios import Captured
from sim.forecast.summary import POINTS, finite, order_statistics
from tracefile.records.arrays import FloatArray, IntArray

_OK = STATUSES.index("ok")


def measured_row(captured: Captured, cohorts: Mapping[str, IntArray]) -> Row | None:
    """Return the captured load as its trace tells it; None: the trace has no times, or was simulated."""
    run = make_run(MEASURED, captured.path.name, captured.meta, captured.records)
    waits = {name: first_token_waits(run, places) for name, places in cohorts.items()}
    waits = {name: one for name, one in waits.items() if one.count(EVENT)}
    if captured.meta.source == "sim" or not (waits or np.isfinite(run.e2e_ms).any()):
        return None
    values = dict(_engine_values(captured, run))
    levels = np.array(list(LEVELS.values()))
    for cohort, one in waits.items():
        at_levels = quantiles(one, incidence(one), levels).tolist()
        values |= {ttft(cohort, level): value for level, value in zip(LEVELS, at_levels, strict=True)}
    known = {name: finite(value) for name, value in values.items()}
    return Row(
        name=MEASURED,
        kind=MEASURED,
        settings={},
        rate=1.0,
        cold_prompts=captured.cold,
        num_gpu_blocks=captured.engine.num_gpu_blocks,
        measures={
            name: Measure(value=Span(middle=value, low=value, high=value))
            for name, value in known.items()
            if value is not None
        },
        curves={cohort: _curve(one) for cohort, one in waits.items()},
    )


def _engine_values(captured: Captured, run: Run) -> Iterator[tuple[str, float]]:
    reported = (run.prompt_tokens != UNKNOWN) & (run.cached_tokens != UNKNOWN)
    if reported.any():
        yield "hit_rate", run.cached_tokens[reported].sum() / max(run.prompt_tokens[reported].sum(), 1)
    for name, values in (("itl", run.itl_ms), ("e2e", run.e2e_ms)):
        at_levels = order_statistics(values, list(LEVELS.values())).tolist()
        yield from ((f"{name}.{level}", value) for level, value in zip(LEVELS, at_levels, strict=True))
    ends_ms = run.arrival_ms + run.e2e_ms
    if np.isfinite(ends_ms).any():
        seconds = (np.nanmax(ends_ms) - np.nanmin(run.arrival_ms)) / 1e3
        yield "requests_per_s", (run.status == _OK).sum() / seconds
        yield "output_tokens_per_s", sum(record.output_tokens or 0 for record in captured.records) / seconds


def _curve(waits: Waits) -> Curve:
    first_ms = max(float(waits.time_ms[0]), 1e-3)
    last_ms = float(waits.time_ms[waits.end == EVENT][-1])
    grid_ms: FloatArray = np.geomspace(first_ms, max(last_ms, first_ms), POINTS)
    share = [round(value, 5) for value in survival_at(waits, incidence(waits), grid_ms).tolist()]
    times_ms = [round(time_ms, 3) for time_ms in grid_ms.tolist()]
    return Curve(time_ms=times_ms, middle=share, low=share, high=share, stops=False)


def errors_of(forecast: Mapping[str, Measure], measured: Row) -> dict[str, float]:
    """Return forecast / measured − 1 by measure, of the middle member."""
    found = {}
    for name, measure in measured.measures.items():
        truth, made = measure.value.middle, forecast[name].value.middle
        if truth and made is not None:
            found[name] = round(made / truth - 1.0, 6)
    return found


def error_sentence(capture: Row, cohort: str) -> str | None:
    """Say if the capture's forecast keeps the limits of ``sim validate``; None: nothing was measured."""
    errors = {level: capture.errors.get(ttft(cohort, level)) for level in LEVELS}
    known = {level: error for level, error in errors.items() if error is not None}
    if not known:
        return None
    said = listed([f"{signed_percent(error)} at {level}" for level, error in known.items()])
    limits = IN_SATURATION if capture.demand is not None and capture.demand.saturated else BELOW_SATURATION
    beyond = [level for level, error in known.items() if abs(error) > limits.get(level, np.inf)]
    if not beyond:
        return f"the forecast of this capture: TTFT {said}, within the limits of sim validate"
    return (
        f"this model misses this capture: TTFT {said}; {listed(beyond)} beyond the limit of sim validate "
        f"({listed([signed_percent(limits[level]).strip('+') for level in beyond])}). Trust no effect of that size"
    )
