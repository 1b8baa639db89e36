"""vllm-vcr traces: what an engine-side tap saw of each request, under the names this schema took from it.

Source: neuralmagic/vllm-vcr, crate sim-trace: JSON Lines, plain or gzip, an optional ``{"meta": {...}}`` line, a
record a line in finish order. Their times count from the engine core's sight of the request.
"""

from typing import Any

import msgspec

from tracefile.records.decoding import checked_meta, convert_object, parse_object
from tracefile.records.schema import (
    BlockHash,
    Count,
    Engine,
    HashInfo,
    Meta,
    Ordinal,
    Record,
    RequestId,
    Status,
    Time,
)


class ItlSummary(msgspec.Struct, kw_only=True):
    """Gaps where the full list was not kept."""

    mean_ms: Time
    count: Count


class VcrRecord(msgspec.Struct, kw_only=True):
    """A line of theirs: fields that our schema has; all others are kept in ``extra``."""

    prompt_tokens: Count
    cached_tokens: Count | None = None
    """They read an absent count as 0. Here it stays null: absent is not a reported miss (they always write it)."""
    output_tokens: Count | None = None
    ttft_ms: Time | None = None
    itl_ms: list[Time] | None = None
    itl_summary: ItlSummary | None = None
    """Expanded to ``count`` gaps of ``mean_ms``."""
    itl_tokens: list[Count] | None = None
    """Absent: one token a gap."""
    concurrency: Ordinal = 1
    arrival_ms: Time | None = None
    block_hashes: list[int] | None = None
    """Chained FNV-1a, 64 bit; absent if the prompt has no full block, or if none were recorded."""
    mm_hashes: list[str] | None = None
    finish_reason: str | None = None
    extra: dict[str, Any] = {}


class VcrMeta(msgspec.Struct, kw_only=True):
    """Their header, as far as our schema has a place; all other keys (gpu, tp, …) are kept in ``extra``."""

    model: str | None = None
    max_num_seqs: int | None = None
    source: str | None = None
    block_size: int | None = None
    """Tokens in one hashed block; null: no hashes were recorded."""
    vllm_version: str | None = None
    extra: dict[str, Any] = {}


CONTENT_FIELDS = frozenset({"output_token_ids"})
"""Dropped on sight: with the tokenizer they are the answer's text."""

STATUS_OF_FINISH: dict[str, Status] = {"abort": "client_abort", "error": "error"}


class VcrDecoder:
    """vllm-vcr lines as records; ids are ``vcr-1``, ``-2``, … in file order, the same at every reading."""

    def __init__(self, meta: dict[str, Any], where: str) -> None:
        self.meta = import_meta(meta, where)
        self._count = 0
        self._with_content = 0
        self._with_images = 0

    @property
    def warnings(self) -> list[str]:
        warnings = []
        if self._with_content:
            warnings.append(f"output_token_ids of {self._with_content} records dropped: they are the answers' text")
        if self._with_images:
            warnings.append(
                f"{self._with_images} records have images whose place in the prompt is not recorded: "
                "their hash chains count for nothing (hashable_blocks 0)"
            )
        return warnings

    def decode_all(self, line: bytes, where: str) -> list[Record]:
        found = parse_object(line, where)
        kept = {key: value for key, value in found.items() if key not in CONTENT_FIELDS}
        self._with_content += len(kept) < len(found)
        vcr = convert_object(kept, VcrRecord, where)
        self._with_images += bool(vcr.mm_hashes)
        self._count += 1
        return [self._record(vcr)]

    def _record(self, vcr: VcrRecord) -> Record:
        itl_ms = import_gaps(vcr)
        return Record(
            request_id=RequestId(f"vcr-{self._count}"),
            arrival_ms=vcr.arrival_ms,
            ttft_ms=vcr.ttft_ms,
            itl_ms=itl_ms,
            itl_tokens=vcr.itl_tokens if vcr.itl_tokens is not None else [1] * len(itl_ms),
            e2e_ms=None if vcr.ttft_ms is None else vcr.ttft_ms + sum(itl_ms),
            status=STATUS_OF_FINISH.get(vcr.finish_reason or "", "ok"),
            finish_reason=vcr.finish_reason,
            model=self.meta.model,
            prompt_tokens=vcr.prompt_tokens,
            output_tokens=vcr.output_tokens,
            cached_tokens=vcr.cached_tokens,
            tokens_source="usage",
            concurrency=vcr.concurrency,
            block_hashes=self._hashes(vcr),
            hashable_blocks=0 if vcr.mm_hashes else None,
            hash_source="engine" if vcr.block_hashes is not None else None,
            extra=vcr.extra | ({"mm_hashes": vcr.mm_hashes} if vcr.mm_hashes else {}),
        )

    def _hashes(self, vcr: VcrRecord) -> list[BlockHash] | None:
        if vcr.block_hashes is not None:
            return [BlockHash(value) for value in vcr.block_hashes]
        too_short = self.meta.block_size is not None and vcr.prompt_tokens < self.meta.block_size
        return [] if too_short else None


def import_gaps(vcr: VcrRecord) -> list[float]:
    """The gaps in ms: the list if there is one, else the summary's mean as often as it counts."""
    if vcr.itl_ms is not None:
        return vcr.itl_ms
    if vcr.itl_summary is not None:
        return [vcr.itl_summary.mean_ms] * vcr.itl_summary.count
    return []


def import_meta(found: dict[str, Any], where: str) -> Meta:
    """Their header as ours."""
    vcr = convert_object(found, VcrMeta, f"{where}: meta")
    made = Meta(
        source="tap" if vcr.source == "tap" else None,
        model=vcr.model,
        block_size=vcr.block_size,
        hash=None if vcr.block_size is None else HashInfo(algorithm="vllm-vcr"),
        engine=Engine(
            name=None if vcr.vllm_version is None else "vllm",
            version=vcr.vllm_version,
            max_num_seqs=vcr.max_num_seqs,
        ),
        extra=vcr.extra | ({} if vcr.source is None else {"vcr_source": vcr.source}),
    )
    return checked_meta(made, where)
