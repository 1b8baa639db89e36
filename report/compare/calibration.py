"""Survival calibration: captures, forecasts of them as ensembles, and whether the ones are what the others said."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from measure.runs import Run
from report.compare.baselines import Line, judge_baselines
from report.compare.comparison import Compared, Question, compare_runs, find_yardstick
from report.compare.ensembles import middle_run
from report.compare.gates import check_gate, parse_gate
from report.compare.pairing import resolve_truths
from report.compare.results import Forecast
from report.compare.standards import standard_gates

SCHEMA = "kvtape-validate/1"


@dataclass(frozen=True, slots=True)
class Predicted:
    """A forecast, and what it is judged by."""

    truth: str
    members: Sequence[Run]
    """Row i of each is the same request."""
    facts: Forecast


@dataclass(frozen=True, slots=True)
class Yardsticks:
    """What a forecast is held against, and how sure one wants to be."""

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

    Labels keep the order of ``captured``, each forecast after the first capture's other runs. InputError for a gate
    that names nothing, and where a model was fitted on a capture that is here.
    """
    named = {label: forecast.truth for label, forecast in predicted.items()}
    labels = [*captured, *predicted]
    truths = resolve_truths(labels, named)
    gates = tuple(parse_gate(expression, list(truths)) for expression in yardsticks.gates)
    question = Question(truths, find_yardstick(yardsticks.aa, truths), yardsticks.seed, yardsticks.bootstrap)
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
    checked = [*standard, *(check_gate(gate, result.pairs) for gate in gates)]
    return replace(compared, result=msgspec.structs.replace(result, gates=checked))
