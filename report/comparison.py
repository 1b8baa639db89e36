"""The comparison itself: read, refuse, join, cut into cohorts, measure, judge."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from report.agreement import cached_agreement, hit_ratio
from report.cells import MIN_CELL, Cell, describe, joined_rows, judge, measure
from report.cohorts import MAIN, Traits, borrowed_traits, cohort_rows, own_traits
from report.conditions import same_conditions
from report.gates import check_gate, parse_gate
from report.headline import headline
from report.independence import refuse_fitted_on_compared
from report.notes import notes_on, order_notes
from report.pairing import Join, join_runs, resolve_truths
from report.resampling import CONFIDENCE, draw_weights
from report.results import METRICS, SCHEMA, Comparison, LabelCohort, Metric, Pair, PairCohort, Provenance
from report.runs import STATUSES, UNKNOWN, FloatArray, IntArray, Run, load_run
from report.survival import Waits, completion_waits, first_token_waits, token_gaps, token_paces
from tracefile.errors import InputError

Cells = Mapping[tuple[str, str, Metric], Cell]


@dataclass(frozen=True, slots=True)
class CompareConfig:
    """What to compare, as the command line said it."""

    traces: Mapping[str, Path]
    """By label, in the order given; the first is the truth of the others."""
    truths: Mapping[str, str]
    """Labels whose truth is another than the first; a label named as its own truth has none."""
    yardstick: str | None
    seed: int
    bootstrap: int
    """Draws of the session bootstrap; 0: no intervals."""
    gates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Compared:
    """The result, and what pictures are drawn from."""

    result: Comparison
    runs: Mapping[str, Run]
    joins: Mapping[str, Join]
    cells: Cells


@dataclass(frozen=True, slots=True)
class _Cut:
    """A run cut into cohorts, with each record's session as a number shared by every run."""

    rows: Mapping[str, IntArray]
    session_of_row: IntArray


@dataclass(frozen=True, slots=True)
class _Material:
    """What pairs are judged from, by label."""

    runs: Mapping[str, Run]
    joins: Mapping[str, Join]
    cuts: Mapping[str, _Cut]
    cells: Cells


def compare(config: CompareConfig) -> Compared:
    """Everything ``report compare`` knows; InputError for traces that cannot or must not be compared."""
    truths = resolve_truths(list(config.traces), config.truths)
    gates = [parse_gate(expression, list(truths)) for expression in config.gates]
    yardstick = _yardstick(config, truths)
    runs = {label: load_run(label, path) for label, path in config.traces.items()}
    unsaid = refuse_fitted_on_compared(list(runs.values()))
    joins = {label: join_runs(runs[truth], runs[label]) for label, truth in truths.items()}
    cuts, sessions = _cut(runs, truths, joins)
    cells = _measure(runs, cuts, draw_weights(sessions, config.bootstrap, config.seed))
    traces = {label: _provenance(run, cuts[label], cells) for label, run in runs.items()}
    pairs = _judge_all(_Material(runs, joins, cuts, cells), truths, yardstick)
    result = Comparison(
        schema=SCHEMA,
        headline=headline(traces, pairs, MIN_CELL),
        notes=order_notes(unsaid, notes_on(runs, traces, pairs)),
        seed=config.seed,
        bootstrap=config.bootstrap,
        confidence=CONFIDENCE,
        min_cell=MIN_CELL,
        yardstick=yardstick,
        traces=traces,
        pairs=pairs,
        gates=[check_gate(gate, pairs) for gate in gates],
    )
    return Compared(result, runs, joins, cells)


def _yardstick(config: CompareConfig, truths: Mapping[str, str]) -> str | None:
    """The A/A label: the one named, else one called ``again``."""
    if config.yardstick is None:
        return "again" if "again" in truths else None
    if config.yardstick not in truths:
        raise InputError(f"--aa {config.yardstick}: no compared label; expected one of {', '.join(truths)}")
    return config.yardstick


def _cut(runs: Mapping[str, Run], truths: Mapping[str, str], joins: Mapping[str, Join]) -> tuple[dict[str, _Cut], int]:
    """Cohorts and session numbers of every run, taken from its truth where a request has its counterpart there."""
    traits: dict[str, Traits] = {}
    sessions: dict[str, npt.NDArray[np.str_]] = {}
    alone = [label for label in runs if label not in truths]
    for label in [*alone, *truths]:
        run = runs[label]
        traits[label] = own_traits(run)
        names = [
            f"s{session}" if session is not None else f"r{request_id}"
            for session, request_id in zip(run.sessions, run.request_ids, strict=True)
        ]
        sessions[label] = np.array(names, dtype=object)
        if label in truths:
            truth, join = truths[label], joins[label]
            traits[label] = borrowed_traits(traits[label], traits[truth], join.other_rows, join.truth_rows)
            sessions[label][join.other_rows] = sessions[truth][join.truth_rows]
    number: dict[str, int] = {}
    numbered = {
        label: np.array([number.setdefault(name, len(number)) for name in sessions[label]], dtype=np.int64)
        for label in runs
    }
    return {label: _Cut(cohort_rows(traits[label]), numbered[label]) for label in runs}, len(number)


def _samples(run: Run, rows: IntArray) -> Iterator[tuple[Metric, Waits]]:
    yield "ttft", first_token_waits(run, rows)
    yield "tpot", token_paces(run, rows)
    yield "itl", token_gaps(run, rows)
    yield "e2e", completion_waits(run, rows)


def _measure(
    runs: Mapping[str, Run], cuts: Mapping[str, _Cut], weights: npt.NDArray[np.uint16]
) -> dict[tuple[str, str, Metric], Cell]:
    """Every cell. Intervals where they are shown: not of gaps, and in buckets of TTFT alone."""
    cells: dict[tuple[str, str, Metric], Cell] = {}
    for label, run in runs.items():
        for cohort, rows in cuts[label].rows.items():
            for metric, waits in _samples(run, rows):
                banded = metric == "ttft" or (metric != "itl" and cohort in MAIN)
                cells[label, cohort, metric] = measure(waits, cuts[label].session_of_row, weights if banded else None)
    return cells


def _judge_all(material: _Material, truths: Mapping[str, str], yardstick: str | None) -> dict[str, Pair]:
    """Every pair, in the order of the labels; the A/A pair is made first, so that the others stand beside it."""
    pairs: dict[str, Pair] = {}
    for label in sorted(truths, key=lambda name: name != yardstick):
        truth = truths[label]
        beside = pairs.get(yardstick) if yardstick is not None and truths[yardstick] == truth else None
        pairs[label] = _judge_pair(material, truth, label, beside)
    return {label: pairs[label] for label in material.runs if label in pairs}


def _judge_pair(material: _Material, truth_label: str, label: str, beside: Pair | None) -> Pair:
    truth, other, join = material.runs[truth_label], material.runs[label], material.joins[label]
    cells = material.cells
    judged: dict[str, PairCohort] = {}
    for name, rows in material.cuts[truth_label].rows.items():
        if (label, name, "ttft") not in cells:
            continue
        truth_rows, other_rows = joined_rows(join, rows, truth)
        aa = beside.cohorts.get(name) if beside is not None else None
        errors = {
            metric: judge(
                cells[truth_label, name, metric],
                cells[label, name, metric],
                _per_request(metric, truth, other, truth_rows, other_rows),
                getattr(aa, metric) if aa is not None else None,
            )
            for metric in METRICS
        }
        judged[name] = PairCohort(cached=cached_agreement(truth, other, truth_rows, other_rows, MIN_CELL), **errors)
    return Pair(
        truth=truth_label,
        kind="error" if same_conditions(truth.meta, other.meta) else "contrast",
        joined=len(join),
        unmatched_truth=join.unmatched_truth,
        unmatched_other=join.unmatched_other,
        cohorts=judged,
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


def _provenance(run: Run, cut: _Cut, cells: Cells) -> Provenance:
    engine = run.meta.engine
    named = {session for session in run.sessions if session is not None}
    counted = np.bincount(run.status, minlength=len(STATUSES))
    return Provenance(
        file=run.file,
        digest=run.digest,
        source=run.meta.source,
        records=len(run),
        sessions=len(named) or None,
        statuses={status: int(count) for status, count in zip(STATUSES, counted, strict=True) if count},
        engine=" ".join(filter(None, [engine.name, engine.version])) or None if engine else None,
        model=run.meta.model,
        block_size=(engine.block_size if engine else None) or run.meta.block_size,
        epoch_unix_ns=run.meta.epoch_unix_ns,
        workload=_workload(run),
        cohorts={name: _label_cohort(run, name, rows, cells) for name, rows in cut.rows.items()},
    )


def _workload(run: Run) -> str | None:
    workload = run.meta.workload
    if workload is None:
        return None
    said = [
        workload.pattern,
        f"seed {workload.seed}" if workload.seed is not None else None,
        "cold prompts" if workload.cold_prompts else None,
        f"speedup {workload.speedup:g}" if workload.speedup not in (None, 1.0) else None,
    ]
    return ", ".join(word for word in said if word) or None


def _label_cohort(run: Run, name: str, rows: IntArray, cells: Cells) -> LabelCohort:
    return LabelCohort(
        records=len(rows),
        cached_reported=int(np.count_nonzero(run.cached_tokens[rows] != UNKNOWN)),
        hit_ratio=hit_ratio(run.prompt_tokens[rows], run.cached_tokens[rows]),
        **{metric: describe(cells[run.label, name, metric]) for metric in METRICS},
    )
