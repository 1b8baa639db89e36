"""Provenance of a compared trace, and agreement of two traces on cached tokens."""

from collections.abc import Mapping

import msgspec
import numpy as np

from measure.runs import STATUSES, UNKNOWN, Run
from report.compare.cells import (
    Cells,
    describe,
)
from report.compare.results import (
    METRICS,
    CachedAgreement,
    LabelCohort,
    Provenance,
)
from tracefile.records.arrays import IntArray


def provenance(run: Run, cohorts: Mapping[str, IntArray], cells: Cells, members: int) -> Provenance:
    """Describe a run; ``cohorts``: rows by cohort; ``members``: pooled in its latency cells, 0 for a trace."""
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
        cohorts={name: _label_cohort(run, name, rows, cells) for name, rows in cohorts.items()},
    )


def _label_cohort(run: Run, name: str, rows: IntArray, cells: Cells) -> LabelCohort:
    return LabelCohort(
        records=len(rows),
        sessions=len({session for row in rows if (session := run.sessions[row]) is not None}) or None,
        cached_reported=int(np.count_nonzero(run.cached_tokens[rows] != UNKNOWN)),
        hit_ratio=hit_ratio(run.prompt_tokens[rows], run.cached_tokens[rows]),
        **{metric: describe(cells[run.label, name, metric]) for metric in METRICS},
    )


def cached_agreement(
    truth: Run, other: Run, truth_rows: IntArray, other_rows: IntArray, min_cell: int
) -> CachedAgreement:
    """Compare cached tokens of joined requests (row i of both arrays). Unreported tokens are no miss: left out."""
    reference, ours = truth.cached_tokens[truth_rows], other.cached_tokens[other_rows]
    reported = (reference != UNKNOWN) & (ours != UNKNOWN)
    t, o = reference[reported], ours[reported]
    counts = CachedAgreement(
        joined=len(truth_rows),
        n=len(t),
        unreported_truth=int(np.count_nonzero(reference == UNKNOWN)),
        unreported_other=int(np.count_nonzero(ours == UNKNOWN)),
        evaluated=len(t) >= min_cell,
    )
    if not counts.evaluated:
        return counts
    prompts_t, prompts_o = truth.prompt_tokens[truth_rows][reported], other.prompt_tokens[other_rows][reported]
    off = float(np.abs(o - t).sum())
    return msgspec.structs.replace(
        counts,
        exact_share=float(np.mean(o == t)),
        token_error=_ratio(off, float(t.sum())),
        prompt_token_error=_ratio(off, float(prompts_t[prompts_t != UNKNOWN].sum())),
        bias=_ratio(float((o - t).sum()), float(t.sum())),
        truth_hit_ratio=hit_ratio(prompts_t, t),
        other_hit_ratio=hit_ratio(prompts_o, o),
        same_prompt_share=float(np.mean(prompts_t == prompts_o)),
    )


def hit_ratio(prompt_tokens: IntArray, cached_tokens: IntArray) -> float | None:
    """Σ cached / Σ prompt over the requests that report both; null if none does."""
    both = (prompt_tokens != UNKNOWN) & (cached_tokens != UNKNOWN)
    return _ratio(float(cached_tokens[both].sum()), float(prompt_tokens[both].sum()))


def _ratio(subset: float, total: float) -> float | None:
    return float(subset / total) if total else None
