"""Where a label's numbers come from: its trace, its engine, its load, and what it measured in every cohort."""

from collections.abc import Mapping

import numpy as np

from measure.runs import STATUSES, UNKNOWN, Run
from report.compare.agreement import hit_ratio
from report.compare.cells import Cell, describe
from report.compare.results import METRICS, LabelCohort, Metric, Provenance
from tracefile.records.arrays import IntArray

Cells = Mapping[tuple[str, str, Metric], Cell]
"""Every cell by label, cohort and metric."""


def provenance(run: Run, cohorts: Mapping[str, IntArray], cells: Cells, members: int) -> Provenance:
    """``cohorts`` are the run's rows by cohort; ``members``: how many futures its cells pool, 0: it is a trace."""
    engine = run.meta.engine
    named = {session for session in run.sessions if session is not None}
    counted = np.bincount(run.status, minlength=len(STATUSES))
    return Provenance(
        file=run.file,
        digest=run.digest,
        source=run.meta.source,
        members=members or None,
        records=len(run),
        sessions=len(named) or None,
        statuses={status: int(count) for status, count in zip(STATUSES, counted, strict=True) if count},
        engine=" ".join(filter(None, [engine.name, engine.version])) or None if engine else None,
        model=run.meta.model,
        block_size=(engine.block_size if engine else None) or run.meta.block_size,
        epoch_unix_ns=run.meta.epoch_unix_ns,
        workload=_workload(run),
        cohorts={name: _label_cohort(run, name, rows, cells) for name, rows in cohorts.items()},
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
