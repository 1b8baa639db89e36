"""What anyone could forecast without a simulator, judged on the same requests as the forecast."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from measure.cohorts import cohort_rows, own_traits
from measure.runs import STATUSES, UNKNOWN, Run
from measure.waits import first_token_waits
from report.compare.cells import judge, measure
from report.compare.provenance import Cells
from report.compare.results import DurationError
from tracefile.records.arrays import FloatArray


@dataclass(frozen=True, slots=True)
class Line:
    """A TTFT that is linear in the uncached prompt tokens; of slope 0: one TTFT for all."""

    intercept_ms: float
    per_uncached_token_ms: float


def judge_baselines(truth: Run, cells: Cells, lines: Mapping[str, Line]) -> dict[str, dict[str, DurationError]]:
    """Each line's TTFT against the truth's, by cohort.

    A line is told what the engine had cached in fact, which no forecast is.
    """
    cohorts = cohort_rows(own_traits(truth))
    session_of_row = np.arange(len(truth))
    judged: dict[str, dict[str, DurationError]] = {}
    for name, line in lines.items():
        run = replace(truth, ttft_ms=_ttft_ms(truth, line))
        judged[name] = {
            cohort: judge(
                cells[truth.label, cohort, "ttft"],
                measure(first_token_waits(run, rows), session_of_row, None),
                (truth.ttft_ms[rows], run.ttft_ms[rows]),
                None,
            )
            for cohort, rows in cohorts.items()
        }
    return judged


def _ttft_ms(truth: Run, line: Line) -> FloatArray:
    """NaN where the truth does not say what was cached, and where nobody would have waited so long."""
    known = (truth.prompt_tokens != UNKNOWN) & (truth.cached_tokens != UNKNOWN)
    tokens = np.where(known | (line.per_uncached_token_ms == 0.0), truth.prompt_tokens - truth.cached_tokens, np.nan)
    ttft_ms = np.maximum(line.intercept_ms + line.per_uncached_token_ms * tokens, 0.0)
    gone = np.isnan(truth.ttft_ms) & ((truth.e2e_ms < ttft_ms) | (truth.status == STATUSES.index("error")))
    return np.asarray(np.where(gone, np.nan, ttft_ms))
