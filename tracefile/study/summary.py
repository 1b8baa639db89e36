"""``tracefile info``: what is in a trace, in one pass."""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from tracefile.commandline.progress import counted
from tracefile.records.encoding import meta_object
from tracefile.records.reader import TraceReader
from tracefile.records.schema import BlockHash, Record, SessionId


@dataclass(slots=True)
class Summary:
    """Counts over a trace; memory grows with its distinct blocks and sessions alone."""

    records: int = 0
    first_arrival_ms: float | None = None
    last_end_ms: float | None = None
    statuses: Counter[str] = field(default_factory=Counter)
    endpoints: Counter[str] = field(default_factory=Counter)
    prompt_counts: Counter[str] = field(default_factory=Counter)
    """Records, by endpoint, whose prompt both the writer and the engine have counted ..."""
    prompt_mismatches: Counter[str] = field(default_factory=Counter)
    """... and those of them where the two differ: their hashes are not of the engine's tokens."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cached_reported: int = 0
    """Records whose engine said how much it took from its cache."""
    hashed_records: int = 0
    without_hashes: int = 0
    without_usage: int = 0
    """Of the completed: those that lack the tokens of prompt or output."""
    without_cached_tokens: int = 0
    """Of the completed."""
    without_token_times: int = 0
    """Of the completed: responses that were not streamed, so that no token has a time."""
    hashed_tokens: int = 0
    """Prompt tokens in full blocks whose hashes are true."""
    hit_tokens: int = 0
    """Of those, in leading blocks of earlier records: hits of an unlimited cache, one token of each left to compute."""
    distinct_blocks: int = 0
    named_sessions: int = 0
    inferred_sessions: int = 0
    later_turns: int = 0
    """Records with a parent."""
    _blocks: set[BlockHash] = field(default_factory=set, repr=False)
    _sessions: dict[SessionId, bool] = field(default_factory=dict, repr=False)

    def add(self, record: Record, block_size: int | None) -> None:
        self.records += 1
        self.statuses[record.status] += 1
        self.endpoints[record.endpoint or "unknown"] += 1
        self._add_prompt_count(record)
        self._add_span(record)
        self._add_tokens(record)
        self._add_missing(record)
        self._add_session(record)
        if record.block_hashes is not None and block_size is not None:
            self._add_blocks(record, record.block_hashes, block_size)
        else:
            self.without_hashes += 1

    def _add_prompt_count(self, record: Record) -> None:
        differs = record.prompt_tokens_by_tokenizer is not None
        whole = record.hash_source in ("engine", "tokenizer") and record.hashable_blocks is None
        if differs or (whole and record.tokens_source == "usage"):
            endpoint = record.endpoint or "unknown"
            self.prompt_counts[endpoint] += 1
            self.prompt_mismatches[endpoint] += differs

    def _add_span(self, record: Record) -> None:
        if record.arrival_ms is None:
            return
        end_ms = record.end_ms() or record.arrival_ms
        first, last = self.first_arrival_ms, self.last_end_ms
        self.first_arrival_ms = record.arrival_ms if first is None else min(first, record.arrival_ms)
        self.last_end_ms = end_ms if last is None else max(last, end_ms)

    def _add_tokens(self, record: Record) -> None:
        self.prompt_tokens += record.prompt_tokens or 0
        self.output_tokens += record.output_tokens or 0
        self.cached_tokens += record.cached_tokens or 0
        self.cached_reported += record.cached_tokens is not None

    def _add_missing(self, record: Record) -> None:
        ok = record.status == "ok"
        self.without_usage += ok and (record.prompt_tokens is None or record.output_tokens is None)
        self.without_cached_tokens += ok and record.cached_tokens is None
        self.without_token_times += ok and record.stream is False and record.ttft_ms is None

    def _add_session(self, record: Record) -> None:
        self.later_turns += record.parent_id is not None
        if record.session_id is None or record.session_id in self._sessions:
            return
        inferred = record.session_source == "inferred"
        self._sessions[record.session_id] = inferred
        self.inferred_sessions += inferred
        self.named_sessions += not inferred

    def _add_blocks(self, record: Record, hashes: list[BlockHash], block_size: int) -> None:
        true = hashes[: record.hashable_blocks]
        tokens = len(true) * block_size if record.prompt_tokens is None else record.prompt_tokens
        limit = min(len(true), max(tokens - 1, 0) // block_size)
        hit = next((i for i in range(limit) if true[i] not in self._blocks), limit)
        self.hashed_records += 1
        self.hashed_tokens += len(true) * block_size
        self.hit_tokens += hit * block_size
        self._blocks.update(true)
        if len(true) == len(hashes):
            self._blocks.update(record.output_block_hashes or ())
        self.distinct_blocks = len(self._blocks)


def summarise(reader: TraceReader) -> Summary:
    """Count every record of an opened trace."""
    summary = Summary()
    block_size = reader.meta.block_size
    for record in counted(reader, "records read"):
        summary.add(record, block_size)
    return summary


def summary_object(reader: TraceReader, summary: Summary) -> dict[str, Any]:
    """Return the object of ``info --json``: the counts, the header and the warnings."""
    counts = {name.name: getattr(summary, name.name) for name in fields(summary) if not name.name.startswith("_")}
    return {
        "path": reader.path,
        "format": reader.format,
        **counts,
        "hashed_share": share(summary.hashed_tokens, summary.prompt_tokens),
        "hit_share": share(summary.hit_tokens, summary.prompt_tokens),
        "meta": meta_object(reader.meta),
        "warnings": reader.warnings,
    }


def share(part: int, whole: int) -> float | None:
    """``part`` / ``whole``; null of nothing."""
    return part / whole if whole else None
