"""What a reader must know before believing the numbers: what was not joined, not reported, not comparable."""

from collections.abc import Mapping, Sequence

from measure.clientlag import client_lag
from measure.runs import Run
from report.compare.results import Pair, Provenance

_FEW_SESSIONS = 20
"""Under so many sessions a percentile bootstrap is known to give intervals that are too narrow."""


def notes_on(runs: Mapping[str, Run], traces: Mapping[str, Provenance], pairs: Mapping[str, Pair]) -> list[str]:
    """Sentences, trace by trace, then pair by pair."""
    notes = [note for run in runs.values() for note in _of_run(run)]
    for label, pair in pairs.items():
        notes += _of_pair(label, pair)
        notes += _of_engines(runs[pair.truth], runs[label])
    few = {label: sessions for label, trace in traces.items() if (sessions := _sessions(trace)) < _FEW_SESSIONS}
    if few:
        named = ", ".join(f"{label} {sessions}" for label, sessions in few.items())
        notes.append(f"Few sessions to resample ({named}): intervals are likely too narrow.")
    return notes


def _of_run(run: Run) -> list[str]:
    notes = [f"{run.label}: {_without_folder(warning, run.file)}." for warning in run.warnings]
    twice = len(run) - len(set(run.request_ids))
    if twice:
        notes.append(f"{run.label}: {twice:,} records repeat a request_id; only the first of each is joined.")
    lag = client_lag(run)
    if lag is not None and lag.flagged:
        notes.append(
            f"{run.label}: the client was late: lag p99 {lag.p99_ms:.1f} ms is above {lag.limit_ms:.1f} ms "
            f"({lag.late:,} of {lag.requests:,} requests are); trust none of its latencies."
        )
    return notes


def _of_pair(label: str, pair: Pair) -> list[str]:
    notes = []
    if pair.unmatched_truth or pair.unmatched_other:
        notes.append(
            f"{label} and {pair.truth} share {pair.joined:,} requests; {pair.unmatched_truth:,} only in "
            f"{pair.truth}, {pair.unmatched_other:,} only in {label}."
        )
    cached = pair.cohorts["all"].cached
    if cached.joined and not cached.n:
        notes.append(f"{label} and {pair.truth}: no request reports cached tokens on both sides.")
    elif cached.joined > cached.n:
        notes.append(f"{label} and {pair.truth}: {cached.joined - cached.n:,} requests lack cached tokens on a side.")
    if cached.same_prompt_share is not None and cached.same_prompt_share < 1.0:
        different = round((1.0 - cached.same_prompt_share) * cached.n)
        notes.append(f"{label} and {pair.truth}: prompts of {different:,} joined requests differ in length.")
    if pair.kind == "error" and cached.exact_share is not None and cached.exact_share < 0.99:
        notes.append(f"{label}: cached tokens disagree with {pair.truth}; read its latencies with that in mind.")
    return notes


def _of_engines(truth: Run, other: Run) -> list[str]:
    if truth.meta.engine is None or other.meta.engine is None:
        return []
    notes = []
    for name in ("block_size", "num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens"):
        t, o = getattr(truth.meta.engine, name), getattr(other.meta.engine, name)
        if t is not None and o is not None and t != o:
            notes.append(f"{other.label} ran with {name} {o:,}, {truth.label} with {t:,}.")
    return notes


def _sessions(trace: Provenance) -> int:
    return trace.cohorts["all"].ttft.sessions


def _without_folder(warning: str, file: str) -> str:
    """Readers name the whole path; a page that is passed around should not."""
    before, found, after = warning.partition(file)
    return f"{file}{after}" if found and " " not in before else warning


def order_notes(*groups: Sequence[str]) -> list[str]:
    """All notes once each, in order."""
    return list(dict.fromkeys(note for group in groups for note in group))
