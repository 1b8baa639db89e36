"""Validation of forecasts: ensembles judged by captures, and simple predictors judged by the same requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from measure.cohorts import cohort_rows, own_traits
from measure.runs import STATUSES, UNKNOWN, Run
from measure.waits import first_token_waits
from report.compare.cells import judge, measure
from report.compare.comparison import Compared, Question, compare_runs, find_yardstick
from report.compare.ensembles import middle_run
from report.compare.gates import parse_gate, standard_gates
from report.compare.pairing import resolve_truths
from report.compare.provenance import Cells
from report.compare.results import DurationError, Forecast
from tracefile.records.arrays import FloatArray

SCHEMA = "kvtape-validate/1"


@dataclass(frozen=True, slots=True)
class Line:
    """A TTFT that is linear in the uncached prompt tokens; of slope 0: one TTFT for all."""

    intercept_ms: float
    per_uncached_token_ms: float


@dataclass(frozen=True, slots=True)
class Predicted:
    """A forecast and the label of its truth."""

    truth: str
    members: Sequence[Run]
    """Row i of each is the same request."""
    facts: Forecast


@dataclass(frozen=True, slots=True)
class Yardsticks:
    """References that forecasts are held to, and the resampling."""

    aa: str | None
    """Label of another run of the first capture's load. None: the label ``again``, if there is one."""
    baselines: Mapping[str, Line]
    gates: Sequence[str]
    standard: bool
    """Whether the standard gates are asked too."""
    seed: int
    bootstrap: int


def judge_forecasts(
    captured: Mapping[str, Run], predicted: Mapping[str, Predicted], yardsticks: Yardsticks
) -> Compared:
    """Judge each forecast by its capture; the first capture is the truth of every other run.

    Labels keep the order of ``captured``, each forecast after the first capture's other runs. InputError for a bad
    gate, and where a model was fitted on a compared capture.
    """
    named = {label: forecast.truth for label, forecast in predicted.items()}
    labels = [*captured, *predicted]
    truths = resolve_truths(labels, named)
    gates = tuple(parse_gate(text, labels, list(truths)) for text in yardsticks.gates)
    question = Question(truths, find_yardstick(yardsticks.aa, truths), yardsticks.seed, yardsticks.bootstrap, gates)
    middles = {label: replace(middle_run(one.members), label=label) for label, one in predicted.items()}
    members = {label: one.members for label, one in predicted.items()}
    compared = compare_runs({**captured, **middles}, question, members)
    first = next(iter(captured.values()))
    result = msgspec.structs.replace(
        compared.result,
        schema=SCHEMA,
        forecasts={label: one.facts for label, one in predicted.items()},
        baselines=judge_baselines(first, compared.cells, yardsticks.baselines),
    )
    standard = standard_gates(result) if yardsticks.standard else ()
    return replace(compared, result=msgspec.structs.replace(result, gates=[*standard, *result.gates]))


def judge_baselines(truth: Run, cells: Cells, lines: Mapping[str, Line]) -> dict[str, dict[str, DurationError]]:
    """Judge each line's TTFT against the truth's, by cohort.

    A line is told the cached tokens that the engine had, which no forecast is.
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
    """NaN where the truth does not report cached tokens, and where the client would have aborted before."""
    known = (truth.prompt_tokens != UNKNOWN) & (truth.cached_tokens != UNKNOWN)
    tokens = np.where(known | (line.per_uncached_token_ms == 0.0), truth.prompt_tokens - truth.cached_tokens, np.nan)
    ttft_ms = np.maximum(line.intercept_ms + line.per_uncached_token_ms * tokens, 0.0)
    gone = np.isnan(truth.ttft_ms) & ((truth.e2e_ms < ttft_ms) | (truth.status == STATUSES.index("error")))
    return np.asarray(np.where(gone, np.nan, ttft_ms))
