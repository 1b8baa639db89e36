"""Cached tokens by two accounts: the engine's, and an unlimited cache over the block hashes."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from measure.cohorts import ALL, FIRST_TURN, LATER_TURNS, cohort_rows, own_traits
from measure.metrics.results import HitCount, HitParting, Hits, Prefill, UpstreamMetrics
from measure.metrics.statistics import statistics_of
from measure.runs import UNKNOWN, Run
from tracefile.records.arrays import IntArray

DEFAULT_BLOCK: Final = 16
"""Block size of an engine that does not tell its own, for what counts as a difference."""


def count_hits(run: Run) -> Hits:
    """Count cached tokens by each account, and the requests on which they differ."""
    accounts = {"reported": run.cached_tokens, "simulated": run.reusable_tokens}
    rows = {name: rows for name, rows in cohort_rows(own_traits(run)).items() if name in (ALL, FIRST_TURN, LATER_TURNS)}
    counted = {
        name: {cohort: _count(run, tokens, at) for cohort, at in rows.items()} for name, tokens in accounts.items()
    }
    return Hits(**counted, partings=list(_partings(run)))


def _count(run: Run, tokens: IntArray, rows: IntArray) -> HitCount:
    tells = rows[(tokens[rows] != UNKNOWN) & (run.prompt_tokens[rows] != UNKNOWN)]
    hits, prompts = int(tokens[tells].sum()), int(run.prompt_tokens[tells].sum())
    return HitCount(requests=len(tells), tokens=hits, prompt_tokens=prompts, rate=hits / prompts if prompts else None)


def measure_upstreams(run: Run) -> dict[str, UpstreamMetrics]:
    """Return requests, hits and TTFT of each upstream; empty: one served all, or the trace does not say."""
    found = {}
    for place, name in enumerate(run.upstreams if len(run.upstreams) > 1 else ()):
        rows = np.flatnonzero(run.upstream == place)
        found[name] = UpstreamMetrics(
            requests=len(rows),
            completed=int(run.ok[rows].sum()),
            hits=_count(run, run.cached_tokens, rows),
            ttft_ms=statistics_of(run.ttft_ms[rows]),
        )
    return dict(sorted(found.items()))


def block_size(run: Run) -> int:
    """Return the engine's block size, else the trace's."""
    engine = run.meta.engine
    return (engine.block_size if engine else None) or run.meta.block_size or DEFAULT_BLOCK


def _partings(run: Run) -> Iterator[HitParting]:
    mine, theirs = run.cached_tokens, run.reusable_tokens
    both = (mine != UNKNOWN) & (theirs != UNKNOWN)
    for sign, word in ((-1, "<"), (1, ">")):
        off = np.where(both, sign * (mine - theirs), 0)
        rows = np.flatnonzero(off >= block_size(run))
        if len(rows):
            yield HitParting(
                accounts=f"reported {word} simulated",
                requests=len(rows),
                tokens=int(off[rows].sum()),
                example=run.request_ids[rows[np.argmax(off[rows])]],
            )


def measure_prefill(run: Run) -> Prefill:
    """Group TTFT by turn."""
    rows = cohort_rows(own_traits(run))
    return Prefill(
        by_turn={
            name: found
            for name in (FIRST_TURN, LATER_TURNS)
            if name in rows and (found := statistics_of(run.ttft_ms[rows[name]]))
        },
    )
