"""Pairs of runs: joined requests, references, same conditions; models fitted on a compared trace are refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from measure.number_format import factor
from measure.runs import Run
from tracefile.records.arrays import IntArray
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta


@dataclass(frozen=True, slots=True)
class Join:
    """Requests shared by two runs, by ``request_id``: row i of each side is the same request."""

    truth_rows: IntArray
    other_rows: IntArray
    unmatched_truth: int
    unmatched_other: int

    def __len__(self) -> int:
        return len(self.truth_rows)


def join_runs(truth: Run, other: Run) -> Join:
    """Match by ``request_id``; a repeated id is matched once, by its first record."""
    first: dict[str, int] = {}
    for row, request_id in enumerate(truth.request_ids):
        first.setdefault(request_id, row)
    truth_rows: list[int] = []
    other_rows: list[int] = []
    for row, request_id in enumerate(other.request_ids):
        truth_row = first.pop(request_id, None)
        if truth_row is not None:
            truth_rows.append(truth_row)
            other_rows.append(row)
    return Join(
        np.array(truth_rows, dtype=np.int64),
        np.array(other_rows, dtype=np.int64),
        len(truth) - len(truth_rows),
        len(other) - len(other_rows),
    )


_SETTINGS: Final = (
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "enable_chunked_prefill",
    "scheduling_policy",
    "free_rule",
)
"""Engine settings that two runs under the same conditions agree in, as far as both tell them."""
_SAME_CACHE: Final = 0.01
"""An engine that sizes its own cache finds a few blocks more or fewer at every start: that is no other cache."""


def other_conditions(truth: Meta, other: Meta) -> list[str]:
    """Return how prompts, pace, prefix cache and scheduler of ``other`` differ; unknown settings count as equal."""
    (was_cold, pace), (cold, other_pace) = _workload(truth), _workload(other)
    conditions = []
    if cold != was_cold:
        conditions.append("with prompts that share nothing" if cold else "with prompts that share prefixes")
    if _caches(other) != _caches(truth):
        conditions.append("with the prefix cache" if _caches(other) else "without the prefix cache")
    if other_pace != pace:
        conditions.append(f"at {factor(other_pace / pace)} times the pace")
    blocks, other_blocks = _setting(truth, "num_gpu_blocks"), _setting(other, "num_gpu_blocks")
    if blocks is not None and other_blocks is not None and abs(other_blocks - blocks) > _SAME_CACHE * blocks:
        conditions.append(f"with {other_blocks:,} KV blocks instead of {blocks:,}")
    pairs = {name: (_setting(truth, name), _setting(other, name)) for name in _SETTINGS}
    return conditions + [
        f"with {name} {o} instead of {t}"
        for name, (t, o) in pairs.items()
        if t is not None and o is not None and t != o
    ]


def _workload(meta: Meta) -> tuple[bool, float]:
    workload = meta.workload
    return bool(workload and workload.cold_prompts), (workload.speedup if workload else None) or 1.0


def _caches(meta: Meta) -> bool:
    return meta.engine is None or meta.engine.enable_prefix_caching is not False


def _setting(meta: Meta, name: str) -> Any:
    value = getattr(meta.engine, name, None)
    if value is None and meta.engine is not None:
        value = meta.engine.extra.get(name)
    settings = meta.extra.get("settings")
    return settings.get(name) if value is None and isinstance(settings, dict) else value


def refuse_fitted_on_compared(runs: Sequence[Run]) -> list[str]:
    """Raise InputError for a latency model fitted on a compared or predicted trace; return doubts."""
    notes: list[str] = []
    for predicted in (run for run in runs if run.meta.source == "sim"):
        fitted = _fit_digests(predicted)
        if fitted is None:
            notes.append(f"{predicted.label} does not say what its model was fitted on (no fit_digests in its meta).")
            continue
        for run in runs:
            notes += _check(predicted, fitted, run)
    return notes


def _check(predicted: Run, fitted: set[str], run: Run) -> list[str]:
    source = run.meta.workload.source_digest if run.meta.workload else None
    if run is predicted and source in fitted:
        raise InputError(
            f"{predicted.file}: {predicted.label}'s model was fitted on the trace that it predicts "
            f"({_short(source)}); expected a model fitted on other traces"
        )
    if run.meta.source != "sim" and run.digest in fitted:
        raise InputError(
            f"{predicted.file}: {predicted.label}'s model was fitted on {run.label} ({_short(run.digest)}), which "
            "is its reference here; expected a model fitted on other traces"
        )
    if run.meta.source != "sim" and source in fitted:
        return [f"{run.label} replays a trace that {predicted.label}'s model was fitted on: not a load unseen."]
    return []


def _fit_digests(predicted: Run) -> set[str] | None:
    digests = predicted.meta.extra.get("fit_digests")
    if digests is None:
        return None
    if not isinstance(digests, list) or not all(isinstance(digest, str) for digest in digests):
        raise InputError(f"{predicted.file}:1: meta.fit_digests: {digests!r:.60}; expected a list of hex trace digests")
    return set(digests)


def _short(digest: str | None) -> str:
    return f"digest {(digest or '')[:12]}…"
