"""Outcome of a run, from the last messages of its shards and, for a shard that died, from its records."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.core.job import add_shares
from loadgen.runs.merging import record_lines
from loadgen.runs.shardmessages import Done, Failed
from measure.tally import Tally
from tracefile import Meta
from tracefile.records.decoding import KvtapeDecoder

INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUse:
    """Work and CPU time of one shard."""

    where: str
    sent: int
    shard_cpu_s: float
    sender_cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Outcome of a run."""

    tally: Tally
    findings: dict[str, int]
    digest: str
    """Workload's: equal digests, equal planned traffic."""
    sent_digest: str | None
    """Of the sent bodies; null: a shard died with its share."""
    stopped: str | None
    """SIGINT, SIGTERM, refused, or a failed shard; null: not cut short."""
    failures: list[str]
    seconds: float
    """From t = 0 to the last end."""
    shards: list[ShardUse]
    kept: bool = True
    """False: the engine answered no request, so that the trace was removed."""


def outcome_of(
    words: Sequence[Done | Failed],
    parts: Sequence[Path],
    *,
    where: Sequence[str],
    digest: str,
    stopped: str | None,
) -> RunOutcome:
    tally, findings, seconds = Tally(), Counter[str](), 0.0
    shards: list[ShardUse] = []
    done = [word for word in words if isinstance(word, Done)]
    for word, part, place in zip(words, parts, where, strict=True):
        own, own_s = (word.tally, word.seconds) if isinstance(word, Done) else recorded(part)
        tally.merge(own)
        seconds = max(seconds, own_s)
        cpu_s = (word.shard_cpu_s, word.sender_cpu_s) if isinstance(word, Done) else (0.0, 0.0)
        shards.append(ShardUse(where=place, sent=own.started, shard_cpu_s=cpu_s[0], sender_cpu_s=cpu_s[1]))
    for word in done:
        findings.update(word.findings)
    whole = len(done) == len(words)
    return RunOutcome(
        tally=tally,
        findings=dict(findings),
        digest=digest,
        sent_digest=add_shares([word.sent_share for word in done]) if whole else None,
        stopped=stopped or ("refused" if tally.only_refusals else None),
        failures=[f"shard {index}: {word.text}" for index, word in enumerate(words) if isinstance(word, Failed)],
        seconds=seconds,
        shards=shards,
    )


def is_answered(outcome: RunOutcome) -> bool:
    """True unless every request that ended was refused, or could not connect, or was aborted because of the others."""
    tally = outcome.tally
    unanswered = sum(count for kind, count in tally.errors.items() if kind.startswith(("http_", "connect_")))
    if outcome.stopped == "refused":
        unanswered += tally.statuses["client_abort"]
    return not tally.ended or unanswered < tally.ended


def recorded(part: Path) -> tuple[Tally, float]:
    """Tally of a shard that died, from its records, and the end of the last one in seconds."""
    tally, decoder, seconds = Tally(), KvtapeDecoder(Meta()), 0.0
    for line in record_lines(part):
        record = decoder.decode_without_faults(line, str(part))
        tally.started += 1
        tally.finish(record, told=True)
        seconds = max(seconds, (record.end_ms() or 0.0) / 1000)
    return tally, seconds


def exit_code(outcome: RunOutcome) -> int:
    """1 if a process died or nothing ended well; 130 if cut short."""
    if outcome.failures:
        return 1
    if outcome.stopped is not None:
        return INTERRUPTED
    return 0 if outcome.tally.statuses["ok"] else 1
