"""Forecasts beside simpler predictors: each judged by the same truth, and where the forecast is closer."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from measure.runs import Run
from measure.waits import first_token_waits
from report.compare.cells import JUDGED_LEVELS, joined_rows, judge, measure
from report.compare.pairing import join_runs
from report.compare.provenance import Cells
from report.compare.results import DurationError
from tracefile.records.arrays import IntArray

MEASURES: Final = (*JUDGED_LEVELS, "w1_log", "median_abs_error")
"""Errors that a forecast and a predictor are compared by: of quantiles, of the whole curve, of a request."""
BASELINE_CELL: Final = 100
"""Requests of the smallest cohort that must beat every baseline."""
LAST_CAPTURE: Final = "last_capture"
"""Baseline that no gate asks for: a right model differs from a capture as another capture does, or less by a bit."""


def judge_baselines(
    truth: Run, cohorts: Mapping[str, IntArray], cells: Cells, predictors: Mapping[str, Run]
) -> dict[str, dict[str, DurationError]]:
    """Judge each predictor's TTFT in ``cohorts`` of the truth, over the requests that both have."""
    judged: dict[str, dict[str, DurationError]] = {}
    for name, run in predictors.items():
        join = join_runs(truth, run)
        judged[name] = {}
        for cohort, rows in cohorts.items():
            truth_rows, own_rows = joined_rows(join, rows, truth)
            own = measure(first_token_waits(run, own_rows), np.arange(len(run)), None)
            per_request = truth.ttft_ms[truth_rows], run.ttft_ms[own_rows]
            judged[name][cohort] = judge(cells[truth.label, cohort, "ttft"], own, per_request)
    return judged


def losing_p(
    truth: Run, members: Sequence[Run], middle: Run, cohorts: Sequence[IntArray], predictors: Mapping[str, Run]
) -> float | None:
    """Return the share of the capture and the members, each taken for the capture, that a right model loses so badly.

    The forecast's median |error| of a request over a predictor's, at its worst over cohorts and predictors, is
    exchangeable between capture and members of a right model. Null: no cohort of ``BASELINE_CELL`` requests.
    """
    join, worst = join_runs(truth, middle), np.zeros(len(members) + 1)
    for name, run in predictors.items():
        theirs_ms, beside = np.full(len(truth), np.nan), join_runs(truth, run)
        theirs_ms[beside.truth_rows] = run.ttft_ms[beside.other_rows]
        for rows in cohorts if name != LAST_CAPTURE else ():
            t, o = joined_rows(join, rows, truth)
            seen_ms = np.stack([truth.ttft_ms[t], *(member.ttft_ms[o] for member in members)])
            kept = ~np.isnan(seen_ms).any(axis=0) & ~np.isnan(middle.ttft_ms[o]) & ~np.isnan(theirs_ms[t])
            if kept.sum() >= BASELINE_CELL:
                own, theirs = (
                    np.median(np.abs(predicted[kept] / seen_ms[:, kept] - 1.0), axis=1)
                    for predicted in (middle.ttft_ms[o], theirs_ms[t])
                )
                worst = np.maximum(worst, own / np.maximum(theirs, 1e-12))
    return float(np.mean(worst >= worst[0] - 1e-9)) if worst.any() else None


def closer(own: DurationError, baseline: DurationError | None) -> dict[str, bool]:
    """Return if the forecast is closer than a predictor, by each of ``MEASURES`` that both have."""
    if baseline is None:
        return {}
    pairs = {name: (_error(own, name), _error(baseline, name)) for name in MEASURES}
    return {name: ours < theirs for name, (ours, theirs) in pairs.items() if ours is not None and theirs is not None}


def _error(judged: DurationError, measure_name: str) -> float | None:
    found = getattr(judged, measure_name)
    return found if found is None or isinstance(found, float) else found.error
