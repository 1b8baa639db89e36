"""``tracefile info``: request, token, block and session counts of a trace, in one pass."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from tracefile.commandline.progress import counted
from tracefile.files.reading import TraceReader
from tracefile.records.encoding import meta_object
from tracefile.records.errors import USAGE_ADVICE
from tracefile.records.schema import BlockHash, Record, SessionId

MISSING_FIELDS: Final = {
    "without_hashes": "block hashes",
    "without_usage": "usage",
    "without_cached_tokens": "cached tokens",
    "without_token_times": "token times (not streamed)",
}
"""Missing fields of requests, by key of the JSON object."""


@dataclass(slots=True)
class Summary:
    """Counts over a trace; memory grows with its distinct blocks and sessions."""

    records: int = 0
    first_arrival_ms: float | None = None
    last_end_ms: float | None = None
    statuses: Counter[str] = field(default_factory=Counter)
    endpoints: Counter[str] = field(default_factory=Counter)
    prompt_counts: Counter[str] = field(default_factory=Counter)
    """Records by endpoint whose prompt tokens both the writer and the engine counted."""
    prompt_mismatches: Counter[str] = field(default_factory=Counter)
    """Records by endpoint whose two prompt counts differ: their hashes are not of the engine's tokens."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cached_reported: int = 0
    """Records with reported cached tokens."""
    hashed_tokens: int = 0
    """Prompt tokens in full blocks with valid hashes."""
    hit_tokens: int = 0
    """Prefix hits of an unlimited cache, in tokens; at least one token of each prompt is computed."""
    named_sessions: int = 0
    inferred_sessions: int = 0
    later_turns: int = 0
    """Records with a parent."""
    _missing: Counter[str] = field(default_factory=Counter)
    """Requests with a missing field, by key of ``MISSING_FIELDS``; all but hashes: completed requests only."""
    _blocks: set[BlockHash] = field(default_factory=set, repr=False)
    _sessions: set[SessionId] = field(default_factory=set, repr=False)

    @property
    def distinct_blocks(self) -> int:
        return len(self._blocks)

    @property
    def missing(self) -> dict[str, int]:
        """Requests with a missing field, by key of ``MISSING_FIELDS``."""
        return {name: self._missing[name] for name in MISSING_FIELDS}

    def add(self, record: Record, block_size: int | None) -> None:
        endpoint = record.endpoint or "unknown"
        self.records += 1
        self.statuses[record.status] += 1
        self.endpoints[endpoint] += 1
        self.prompt_tokens += record.prompt_tokens or 0
        self.output_tokens += record.output_tokens or 0
        self.cached_tokens += record.cached_tokens or 0
        self.cached_reported += record.cached_tokens is not None
        differs = record.prompt_tokens_by_tokenizer is not None
        is_complete = record.hash_source in ("engine", "tokenizer") and record.hashable_blocks is None
        if differs or (is_complete and record.tokens_source == "usage"):
            self.prompt_counts[endpoint] += 1
            self.prompt_mismatches[endpoint] += differs
        if record.arrival_ms is not None:
            end_ms = record.end_ms() or record.arrival_ms
            first, last = self.first_arrival_ms, self.last_end_ms
            self.first_arrival_ms = record.arrival_ms if first is None else min(first, record.arrival_ms)
            self.last_end_ms = end_ms if last is None else max(last, end_ms)
        self._add_session(record)
        self._add_missing(record, has_hashes=record.block_hashes is not None and block_size is not None)
        if record.block_hashes is not None and block_size is not None:
            self._add_blocks(record, record.block_hashes, block_size)

    def _add_missing(self, record: Record, *, has_hashes: bool) -> None:
        ok = record.status == "ok"
        is_missing = {
            "without_hashes": not has_hashes,
            "without_usage": ok and (record.prompt_tokens is None or record.output_tokens is None),
            "without_cached_tokens": ok and record.cached_tokens is None,
            "without_token_times": ok and record.stream is False and record.ttft_ms is None,
        }
        self._missing.update(name for name, missing in is_missing.items() if missing)

    def _add_session(self, record: Record) -> None:
        self.later_turns += record.parent_id is not None
        if record.session_id is not None and record.session_id not in self._sessions:
            self._sessions.add(record.session_id)
            inferred = record.session_source == "inferred"
            self.inferred_sessions += inferred
            self.named_sessions += not inferred

    def _add_blocks(self, record: Record, hashes: list[BlockHash], block_size: int) -> None:
        true = hashes[: record.hashable_blocks]
        tokens = len(true) * block_size if record.prompt_tokens is None else record.prompt_tokens
        limit = min(len(true), max(tokens - 1, 0) // block_size)
        self.hashed_tokens += len(true) * block_size
        self.hit_tokens += next((i for i in range(limit) if true[i] not in self._blocks), limit) * block_size
        self._blocks.update(true)
        if len(true) == len(hashes):
            self._blocks.update(record.output_block_hashes or ())


def summarise(reader: TraceReader) -> Summary:
    """Count every record of an opened trace."""
    summary = Summary()
    for record in counted(reader, "records read"):
        summary.add(record, reader.meta.block_size)
    return summary


def summary_object(reader: TraceReader, summary: Summary) -> dict[str, Any]:
    """Return the JSON object of ``info --json``: counts, header and warnings."""
    counts = {name.name: getattr(summary, name.name) for name in fields(summary) if not name.name.startswith("_")}
    about = {"path": reader.path, "format": reader.format, "distinct_blocks": summary.distinct_blocks}
    return about | counts | summary.missing | {"meta": meta_object(reader.meta), "warnings": reader.warnings}


def summary_lines(reader: TraceReader, summary: Summary) -> Iterator[str]:
    """Yield the lines of ``info``: counts, then the header."""
    yield f"{reader.path} ({reader.format})"
    span_ms = None if summary.first_arrival_ms is None else (summary.last_end_ms or 0.0) - summary.first_arrival_ms
    cached = f"{summary.cached_tokens:,} (reported by {summary.cached_reported:,} records)"
    advice = "" if reader.meta.source is None else f"; {USAGE_ADVICE}"
    hits = f"{_percent(summary.hit_tokens, summary.prompt_tokens)} of prompt tokens ({summary.hit_tokens:,}; unlimited"
    totals = {"without_hashes": summary.records}
    without = (
        f"{MISSING_FIELDS[name]} {count:,} ({_percent(count, totals.get(name, summary.statuses['ok']))})"
        for name, count in summary.missing.items()
        if count
    )
    yield from _aligned(
        {
            "records": f"{summary.records:,}",
            "span": "unknown" if span_ms is None else f"{span_ms / 1000:,.1f} s",
            "status": _counted(summary.statuses),
            "endpoints": _counted(summary.endpoints),
            "prompt / output tokens": f"{summary.prompt_tokens:,} / {summary.output_tokens:,}",
            "prompt token counts": _prompt_counts(summary),
            "cached tokens": cached if summary.cached_reported else f"reported by no record{advice}",
            "requests without": ", ".join(without) or "none",
            "hashed": f"{_percent(summary.hashed_tokens, summary.prompt_tokens)} of prompt tokens, "
            f"{summary.distinct_blocks:,} distinct blocks",
            "hit potential": f"{hits} cache, blocks of {reader.meta.block_size or '–'} tokens)",
            "sessions": f"{summary.named_sessions:,} named by clients, {summary.inferred_sessions:,} inferred; "
            f"{summary.later_turns:,} later turns",
        }
    )
    yield "meta"
    yield from _aligned(dict(_flat(meta_object(reader.meta))))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _aligned(values: Mapping[str, object]) -> Iterator[str]:
    width = max(map(len, values), default=0)
    return (f"  {name:<{width}}  {value}" for name, value in values.items())


def _prompt_counts(summary: Summary) -> str:
    """Share of records with as many token ids as the engine counted; by endpoint if some differ."""
    checked, wrong = summary.prompt_counts, summary.prompt_mismatches
    if not checked.total():
        return "not checked: no record has token ids and the engine's count"
    shares = (f"{name} {_percent(count - wrong[name], count)}" for name, count in sorted(checked.items()))
    reason = f" ({', '.join(shares)}); hashes of the rest are not of the engine's blocks" if wrong.total() else ""
    equal = _percent(checked.total() - wrong.total(), checked.total())
    return f"equal the engine's in {equal} of {checked.total():,} records{reason}"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common())


def _percent(part: int, total: int) -> str:
    return f"{part / total:.1%}" if total else "–"
