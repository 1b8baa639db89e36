"""Cached prompt tokens: reported by the engine, and simulated in an unlimited prefix cache over the block hashes."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from measure.cohorts import FIRST_TURN, LATER_TURNS, MAIN, cohort_rows, recorded_traits
from measure.metrics.results import HitCount, HitDifference, Hits, Prefill, UpstreamMetrics
from measure.metrics.statistics import statistics_of
from measure.runs import UNKNOWN, Run
from tracefile.records.arrays import IntArray

DEFAULT_BLOCK: Final = 16
"""Block size of an engine that does not report it: the smallest difference that counts."""


def count_hits(run: Run) -> Hits:
    """Count reported and simulated prefix hits in tokens, and the requests on which they differ."""
    accounts = {"reported": run.cached_tokens, "simulated": run.reusable_tokens}
    rows = {name: rows for name, rows in cohort_rows(recorded_traits(run)).items() if name in MAIN}
    counted = {
        name: {cohort: _count(run, tokens, at) for cohort, at in rows.items()} for name, tokens in accounts.items()
    }
    return Hits(**counted, differences=list(_differences(run)))


def _count(run: Run, tokens: IntArray, rows: IntArray) -> HitCount:
    rows = rows[(tokens[rows] != UNKNOWN) & (run.prompt_tokens[rows] != UNKNOWN)]
    hits, prompts = int(tokens[rows].sum()), int(run.prompt_tokens[rows].sum())
    return HitCount(requests=len(rows), tokens=hits, prompt_tokens=prompts, rate=hits / prompts if prompts else None)


def measure_upstreams(run: Run) -> dict[str, UpstreamMetrics]:
    """Return requests, prefix hits and TTFT by upstream; empty: a single upstream, or not recorded."""
    metrics = {}
    for index, name in enumerate(run.upstreams if len(run.upstreams) > 1 else ()):
        rows = np.flatnonzero(run.upstream == index)
        metrics[name] = UpstreamMetrics(
            requests=len(rows),
            completed=int(run.ok[rows].sum()),
            hits=_count(run, run.cached_tokens, rows),
            ttft_ms=statistics_of(run.ttft_ms[rows]),
        )
    return dict(sorted(metrics.items()))


def block_size(run: Run) -> int:
    """Return the engine's block size, else the trace's."""
    engine = run.meta.engine
    return (engine.block_size if engine else None) or run.meta.block_size or DEFAULT_BLOCK


def _differences(run: Run) -> Iterator[HitDifference]:
    reported, simulated = run.cached_tokens, run.reusable_tokens
    both = (reported != UNKNOWN) & (simulated != UNKNOWN)
    for sign, word in ((-1, "<"), (1, ">")):
        excess = np.where(both, sign * (reported - simulated), 0)
        rows = np.flatnonzero(excess >= block_size(run))
        if len(rows):
            yield HitDifference(
                accounts=f"reported {word} simulated",
                requests=len(rows),
                tokens=int(excess[rows].sum()),
                example=run.request_ids[rows[np.argmax(excess[rows])]],
            )


def measure_prefill(run: Run) -> Prefill:
    """Return TTFT by turn: first turns prefill a prompt, later turns mostly hit the prefix cache."""
    rows = cohort_rows(recorded_traits(run))
    return Prefill(
        by_turn={
            name: statistics
            for name in (FIRST_TURN, LATER_TURNS)
            if name in rows and (statistics := statistics_of(run.ttft_ms[rows[name]]))
        },
    )
