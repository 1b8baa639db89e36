"""Outcome of a run, from the last messages of its workers or, for a dead worker, from its records."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.runs.merging import record_lines
from loadgen.runs.messages import Done, Failed
from measure.live_counts import LiveCounts
from tracefile.records.decoding import KvtapeDecoder
from tracefile.records.schema import Meta

INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Outcome of a run: counts of requests and tokens, failures, CPU time."""

    tally: LiveCounts
    findings: dict[str, int]
    digest: str
    """Digest of the workload; equal digests: equal planned requests."""
    stopped: str | None
    """SIGINT, SIGTERM, refused, or a failed worker; null: not interrupted."""
    failures: list[str]
    seconds: float
    """From t = 0 to the last end."""
    cpu_s: list[tuple[str, float]]
    """Name and CPU time of each worker."""
    has_trace: bool = True
    """False: the engine answered no request, and the trace was removed."""


def outcome_of(
    words: Sequence[Done | Failed], parts: Sequence[Path], *, where: Sequence[str], digest: str, stopped: str | None
) -> RunOutcome:
    tally, findings, seconds = LiveCounts(), Counter[str](), 0.0
    for word, part in zip(words, parts, strict=True):
        of_worker, end_s = (word.tally, word.seconds) if isinstance(word, Done) else recorded(part)
        tally.merge(of_worker)
        seconds = max(seconds, end_s)
        findings.update(word.findings if isinstance(word, Done) else {})
    return RunOutcome(
        tally=tally,
        findings=dict(findings),
        digest=digest,
        stopped=stopped or ("refused" if tally.only_refusals else None),
        failures=[f"worker {index}: {word.text}" for index, word in enumerate(words) if isinstance(word, Failed)],
        seconds=seconds,
        cpu_s=[
            (process, word.cpu_s if isinstance(word, Done) else 0.0) for process, word in zip(where, words, strict=True)
        ],
    )


def is_answered(outcome: RunOutcome) -> bool:
    """False if every ended request was refused, could not connect, or was aborted because of such requests."""
    tally = outcome.tally
    unanswered = sum(count for kind, count in tally.errors.items() if kind.startswith(("http_", "connect_")))
    if outcome.stopped == "refused":
        unanswered += tally.statuses["client_abort"]
    return not tally.ended or unanswered < tally.ended


def recorded(part: Path) -> tuple[LiveCounts, float]:
    """Counts of a dead worker from its records, and its last end in seconds."""
    tally, decoder, seconds = LiveCounts(), KvtapeDecoder(Meta()), 0.0
    for line in record_lines(part):
        record = decoder.decode_without_faults(line, str(part))
        tally.started += 1
        tally.finish(record)
        seconds = max(seconds, (record.end_ms() or 0.0) / 1000)
    return tally, seconds


def exit_code(outcome: RunOutcome) -> int:
    """1 if a process died or no request succeeded; 130 if interrupted."""
    if outcome.failures:
        return 1
    if outcome.stopped is not None:
        return INTERRUPTED
    return 0 if outcome.tally.statuses["ok"] else 1
