"""Forecasts beside simpler predictors: each judged by the same truth, and where the forecast is closer."""

from collections.abc import Mapping
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


def closer(own: DurationError, baseline: DurationError | None) -> dict[str, bool]:
    """Return if the forecast is closer than a predictor, by each of ``MEASURES`` that both have."""
    if baseline is None:
        return {}
    pairs = {name: (_error(own, name), _error(baseline, name)) for name in MEASURES}
    return {name: ours < theirs for name, (ours, theirs) in pairs.items() if ours is not None and theirs is not None}


def _error(judged: DurationError, measure_name: str) -> float | None:
    found = getattr(judged, measure_name)
    return found if found is None or isinstance(found, float) else found.error
