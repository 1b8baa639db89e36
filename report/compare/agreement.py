"""Cached tokens of the same request on both sides: what has to be right before a latency means anything."""

import msgspec
import numpy as np

from measure.runs import UNKNOWN, Run
from report.compare.results import CachedAgreement, Disagreement
from tracefile.records.arrays import IntArray

WORST_SHOWN = 20


def cached_agreement(
    truth: Run, other: Run, truth_rows: IntArray, other_rows: IntArray, min_cell: int
) -> CachedAgreement:
    """Compare the cached tokens of joined requests (row i of both arrays: the same one).

    A side that does not report (null) is left out and counted: it is not a miss. Under ``min_cell`` comparable
    requests there is no share and no error, but the disagreements are still listed: they are facts.
    """
    theirs, ours = truth.cached_tokens[truth_rows], other.cached_tokens[other_rows]
    reported = (theirs != UNKNOWN) & (ours != UNKNOWN)
    t, o = theirs[reported], ours[reported]
    counts = CachedAgreement(
        joined=len(truth_rows),
        n=len(t),
        unreported_truth=int(np.count_nonzero(theirs == UNKNOWN)),
        unreported_other=int(np.count_nonzero(ours == UNKNOWN)),
        judged=len(t) >= min_cell,
        worst=_worst(truth, truth_rows[reported], t, o),
    )
    if not counts.judged:
        return counts
    prompts_t, prompts_o = truth.prompt_tokens[truth_rows][reported], other.prompt_tokens[other_rows][reported]
    off = float(np.abs(o - t).sum())
    return msgspec.structs.replace(
        counts,
        exact_share=float(np.mean(o == t)),
        token_error=_ratio(off, float(t.sum())),
        prompt_token_error=_ratio(off, _known_sum(prompts_t)),
        bias=_ratio(float((o - t).sum()), float(t.sum())),
        truth_hit_ratio=hit_ratio(prompts_t, t),
        other_hit_ratio=hit_ratio(prompts_o, o),
        same_prompt_share=float(np.mean(prompts_t == prompts_o)),
    )


def hit_ratio(prompt_tokens: IntArray, cached_tokens: IntArray) -> float | None:
    """Σ cached / Σ prompt over the requests that report both; null if none does."""
    known = (prompt_tokens != UNKNOWN) & (cached_tokens != UNKNOWN)
    return _ratio(float(cached_tokens[known].sum()), float(prompt_tokens[known].sum()))


def _worst(truth: Run, rows: IntArray, t: IntArray, o: IntArray) -> list[Disagreement]:
    """The largest differences first; ties in file order."""
    off = np.abs(o - t)
    order = np.argsort(-off, kind="stable")[:WORST_SHOWN]
    return [
        Disagreement(
            request_id=truth.request_ids[rows[at]],
            turn=int(truth.turn[rows[at]]) if truth.turn[rows[at]] != UNKNOWN else None,
            truth_tokens=int(t[at]),
            other_tokens=int(o[at]),
        )
        for at in order
        if off[at]
    ]


def _known_sum(counts: IntArray) -> float:
    return float(counts[counts != UNKNOWN].sum())


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None
