"""Comparison of traces: join requests, form cohorts, measure latency and cached tokens, evaluate; forecasts too."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from measure.cohorts import MAIN, Traits, borrowed_traits, cohort_rows, recorded_traits
from measure.latency_samples import e2e_sample, itl_sample, tpot_sample, ttft_sample
from measure.resampling import CONFIDENCE, busy_units, draw_weights
from measure.runs import STATUSES, Run, load_run
from measure.survival import LatencySample
from measure.thresholds import BELOW_SATURATION, IN_SATURATION
from report.compare.cells import (
    MIN_CELL,
    Cell,
    Cells,
    evaluate,
    joined_rows,
    measure,
)
from report.compare.ensembles import (
    counted_cohorts,
    coverage,
    measure_ensemble,
    middle_run,
    with_members,
)
from report.compare.gates import Gate, advice, check_gate, parse_gate, standard_gates
from report.compare.headline import doubts, headline, notes_on, order_notes
from report.compare.pairing import Join, join_runs, other_conditions, refuse_fitted_on_compared
from report.compare.provenance import (
    cached_agreement,
    provenance,
)
from report.compare.results import METRICS, SCHEMA, Comparison, Forecast, Metric, Pair, PairCohort
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.errors import InputError

Members = Mapping[str, Sequence[Run]]
"""Runs of an ensemble by label; the label's run is their median, row by row."""

_NO_ROWS: Final[IntArray] = np.empty(0, dtype=np.int64)
_SAMPLES: Final[dict[Metric, Callable[[Run, IntArray], LatencySample]]] = {
    "ttft": ttft_sample,
    "tpot": tpot_sample,
    "itl": itl_sample,
    "e2e": e2e_sample,
}


@dataclass(frozen=True, slots=True)
class CompareConfig:
    """Settings of ``report compare``."""

    traces: Mapping[str, Path]
    """Trace by label, in the order given; the first label is the reference of the rest."""
    repeats: tuple[str, ...] = ()
    """Labels of the first label's load measured again; none given: the label ``again``, if there."""
    seed: int = 0
    bootstrap: int = 500
    gates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Compared:
    """Comparison of latency and cached tokens, with the data of its figures."""

    result: Comparison
    runs: Mapping[str, Run]
    joins: Mapping[str, Join]
    cells: Cells
    cohorts: Mapping[str, Mapping[str, IntArray]]
    """Rows of each label's run by cohort."""


@dataclass(frozen=True, slots=True)
class Question:
    """Reference of each label (an earlier label), repeats and resampling of a comparison."""

    truths: Mapping[str, str]
    repeats: Sequence[str]
    seed: int
    bootstrap: int
    gates: tuple[Gate, ...] = ()
    fitted: Mapping[str, int] = field(default_factory=dict)
    """Captures that an ensemble's model was fitted on, by label."""
    saturated: frozenset[str] = frozenset()
    """Labels of ensembles of a load beyond the engine's capacity."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """Rows of a run by cohort, and the resampling unit of each record, numbered over all runs."""

    rows: Mapping[str, IntArray]
    session_of_row: IntArray
    members: Sequence[Mapping[str, IntArray]] = ()


@dataclass(frozen=True, slots=True)
class _Material:
    """Inputs of pair evaluation, by label."""

    runs: Mapping[str, Run]
    members: Members
    joins: Mapping[str, Join]
    cuts: Mapping[str, _Cut]
    cells: Cells


def compare(config: CompareConfig) -> Compared:
    """Compare latency and cached tokens of traces in files. Raises InputError for traces that cannot be compared."""
    labels = list(config.traces)
    gates = tuple(parse_gate(text, labels, labels[1:]) for text in config.gates)
    repeats = find_repeats(config.repeats, labels[1:])
    runs = {label: load_run(label, path) for label, path in config.traces.items()}
    return compare_runs(runs, Question(truths_of(runs), repeats, config.seed, config.bootstrap, gates))


def compare_runs(runs: Mapping[str, Run], question: Question, members: Members | None = None) -> Compared:
    """Compare runs in memory; labels in ``members`` are ensembles."""
    members, truths = members or {}, question.truths
    unsaid = refuse_fitted_on_compared(list(runs.values()))
    joins = {label: join_runs(runs[truth], runs[label]) for label, truth in truths.items()}
    cuts, sessions = _cut(runs, members, truths, joins)
    cells = _measure(runs, members, cuts, draw_weights(sessions, question.bootstrap, question.seed))
    traces = {
        label: provenance(run, cuts[label].rows, cells, len(members.get(label, ()))) for label, run in runs.items()
    }
    pairs = _evaluate_all(_Material(runs, members, joins, cuts, cells), question)
    result = Comparison(
        schema=SCHEMA,
        headline=headline(traces, pairs, MIN_CELL, question.bootstrap),
        notes=order_notes(unsaid, notes_on(runs, traces, pairs)),
        seed=question.seed,
        bootstrap=question.bootstrap,
        confidence=CONFIDENCE,
        min_cell=MIN_CELL,
        repeats=list(question.repeats),
        traces=traces,
        pairs=pairs,
        gates=[result for gate in question.gates for result in check_gate(gate, traces, pairs)],
    )
    return Compared(result, runs, joins, cells, {label: cut.rows for label, cut in cuts.items()})


def truths_of(runs: Mapping[str, Run]) -> dict[str, str]:
    """Return the reference of each label but the first: the first label.

    The reference of a prediction is the first measured label under its conditions (cache, scheduler, pace), if any.
    """
    first, *other_labels = runs
    measured = [label for label, run in runs.items() if run.meta.source != "sim"]
    truths = {label: first for label in other_labels if label in measured}
    for label in (label for label in other_labels if label not in measured):
        alike = (name for name in measured if not other_conditions(runs[name].meta, runs[label].meta))
        truths[label] = next(alike, first)
    return truths


def find_repeats(named: Sequence[str], labels: Sequence[str]) -> list[str]:
    if not named:
        return ["again"] if "again" in labels else []
    for label in named:
        if label not in labels:
            raise InputError(f"--repeat {label}: no compared label; expected one of {', '.join(labels)}")
    return list(dict.fromkeys(named))


def _cut(
    runs: Mapping[str, Run], members: Members, truths: Mapping[str, str], joins: Mapping[str, Join]
) -> tuple[dict[str, _Cut], int]:
    """Form cohorts of all runs and number resampling units, as in the reference where a request is joined."""
    traits: dict[str, Traits] = {}
    sessions: dict[str, npt.NDArray[np.str_]] = {}
    alone = [label for label in runs if label not in truths]
    for label in [*alone, *truths]:
        run = runs[label]
        traits[label] = recorded_traits(run)
        names = [
            f"s{session}" if session is not None else f"r{request_id}"
            for session, request_id in zip(run.sessions, run.request_ids, strict=True)
        ]
        sessions[label] = np.array(names, dtype=object)
        if label in truths:
            truth, join = truths[label], joins[label]
            traits[label] = borrowed_traits(traits[label], traits[truth], join.other_rows, join.truth_rows)
            sessions[label][join.other_rows] = sessions[truth][join.truth_rows]
    units: dict[str, npt.NDArray[np.str_]] = {}
    number: dict[str, int] = {}
    for label in [*alone, *truths]:
        run, ids = runs[label], np.unique(sessions[label].astype(str), return_inverse=True)[1]
        wait_ms = np.where(np.isnan(run.ttft_ms), run.e2e_ms, run.ttft_ms)
        units[label] = np.array([f"{label} {unit}" for unit in busy_units(run.arrival_ms, wait_ms, ids)], dtype=object)
        if label in truths:
            units[label][joins[label].other_rows] = units[truths[label]][joins[label].truth_rows]
    numbered = {
        label: np.array([number.setdefault(name, len(number)) for name in units[label]], dtype=np.int64)
        for label in runs
    }
    cuts = {
        label: _Cut(
            cohort_rows(traits[label]),
            numbered[label],
            [cohort_rows(replace(traits[label], concurrency=member.concurrency)) for member in members.get(label, ())],
        )
        for label in runs
    }
    return cuts, len(number)


def _measure(
    runs: Mapping[str, Run], members: Members, cuts: Mapping[str, _Cut], weights: npt.NDArray[np.uint16]
) -> dict[tuple[str, str, Metric], Cell]:
    """Measure all latency cells. Intervals where shown: not of ITL, and in buckets of TTFT alone."""
    cells: dict[tuple[str, str, Metric], Cell] = {}
    for label, run in runs.items():
        sessions, runs_of_members = cuts[label].session_of_row, members.get(label)
        for cohort, rows in cuts[label].rows.items():
            for metric, sample in _SAMPLES.items():
                banded = weights if metric == "ttft" or (metric != "itl" and cohort in MAIN) else None
                cells[label, cohort, metric] = (
                    measure(sample(run, rows), sessions, banded)
                    if runs_of_members is None
                    else measure_ensemble(
                        [
                            sample(member, member_rows.get(cohort, _NO_ROWS))
                            for member, member_rows in zip(runs_of_members, cuts[label].members, strict=True)
                        ],
                        sessions,
                        banded,
                    )
                )
    return cells


def _evaluate_all(material: _Material, question: Question) -> dict[str, Pair]:
    """Evaluate all pairs in label order; repeats first, as other latency errors are against their mean."""
    pairs: dict[str, Pair] = {}
    for label in sorted(question.truths, key=lambda name: name not in question.repeats):
        truth = question.truths[label]
        repeats = [] if label in question.repeats else [pairs[name] for name in question.repeats]
        repeats = [pair for pair in repeats if pair.truth == truth]
        pairs[label] = _evaluate_pair(material, truth, label, repeats, question)
    return {label: pairs[label] for label in material.runs if label in pairs}


def _evaluate_pair(
    material: _Material, truth_label: str, label: str, repeats: Sequence[Pair], question: Question
) -> Pair:
    truth, other, join = material.runs[truth_label], material.runs[label], material.joins[label]
    cells, fitted = material.cells, question.fitted.get(label, 0)
    limits = IN_SATURATION if label in question.saturated else BELOW_SATURATION
    cohorts: dict[str, PairCohort] = {}
    for name, rows in material.cuts[truth_label].rows.items():
        if (label, name, "ttft") not in cells:
            continue
        truth_rows, other_rows = joined_rows(join, rows, truth)
        again = [pair.cohorts[name] for pair in repeats if name in pair.cohorts]
        errors = {
            metric: evaluate(
                cells[truth_label, name, metric],
                cells[label, name, metric],
                _per_request(metric, truth, other, truth_rows, other_rows),
                [getattr(cohort, metric) for cohort in again],
                limits,
            )
            for metric in METRICS
        }
        cohorts[name] = PairCohort(cached=cached_agreement(truth, other, truth_rows, other_rows, MIN_CELL), **errors)
    counted = [
        (cohort, cells[truth_label, name, "ttft"], cells[label, name, "ttft"])
        for name, cohort in counted_cohorts(cohorts).items()
    ]
    conditions = other_conditions(truth.meta, other.meta)
    return Pair(
        truth=truth_label,
        kind="contrast" if conditions else "error",
        conditions=conditions,
        joined=len(join),
        unmatched_truth=join.unmatched_truth,
        unmatched_other=join.unmatched_other,
        coverage=with_members(coverage(cohorts), counted, fitted) if label in material.members else None,
        cohorts=cohorts,
    )


def _per_request(
    metric: Metric, truth: Run, other: Run, truth_rows: IntArray, other_rows: IntArray
) -> tuple[FloatArray, FloatArray] | None:
    if metric == "itl":
        return None
    if metric == "e2e":
        # An aborted request's time to its end is no measure of the engine.
        ok = (truth.status[truth_rows] == STATUSES.index("ok")) & (other.status[other_rows] == STATUSES.index("ok"))
        return truth.e2e_ms[truth_rows[ok]], other.e2e_ms[other_rows[ok]]
    if metric == "tpot":
        return truth.tpot_ms[truth_rows], other.tpot_ms[other_rows]
    return truth.ttft_ms[truth_rows], other.ttft_ms[other_rows]


_VALIDATE_SCHEMA = "kvtape-validate/1"


@dataclass(frozen=True, slots=True)
class Predicted:
    """Forecast latencies and the label of their reference."""

    truth: str
    members: Sequence[Run]
    """Row i of each is the same request."""
    facts: Forecast


def evaluate_forecasts(
    captured: Mapping[str, Run],
    predicted: Mapping[str, Predicted],
    *,
    repeats: Mapping[str, str],
    gates: Sequence[str],
    standard: bool,
    seed: int,
    bootstrap: int,
) -> Compared:
    """Evaluate each latency forecast by its capture, other runs by the first capture. Raises as ``compare``.

    ``repeats``: captures of the same load, with the capture that each repeats.
    """
    named = {label: forecast.truth for label, forecast in predicted.items()} | dict(repeats)
    labels = [*captured, *predicted]
    truths = {label: named.get(label, labels[0]) for label in labels[1:]}
    parsed_gates = tuple(parse_gate(text, labels, list(truths)) for text in gates)
    fitted = {label: forecast.facts.fitted_captures for label, forecast in predicted.items()}
    saturated = frozenset(label for label, forecast in predicted.items() if forecast.facts.saturated)
    question = Question(truths, list(repeats), seed, bootstrap, parsed_gates, fitted, saturated)
    middles = {label: replace(middle_run(forecast.members), label=label) for label, forecast in predicted.items()}
    members = {label: forecast.members for label, forecast in predicted.items()}
    compared = compare_runs({**captured, **middles}, question, members)
    result = msgspec.structs.replace(
        compared.result,
        schema=_VALIDATE_SCHEMA,
        forecasts={label: forecast.facts for label, forecast in predicted.items()},
    )
    doubted = [f"{label}: {doubt}" for label, forecast in predicted.items() for doubt in doubts(forecast.facts)]
    result = msgspec.structs.replace(result, headline=[*result.headline, *doubted])
    default_gates = standard_gates(result) if standard else ()
    result = msgspec.structs.replace(result, gates=[*default_gates, *result.gates])
    return replace(compared, result=msgspec.structs.replace(result, next_steps=advice(result)))
