"""Traces of lengths and block ids: Mooncake's lines, and those of vLLM's timed_trace, guidellm and Bailian (Qwen).

The formats are those of ``tracefile.importers.blocktraces``. vLLM's ``timed_trace`` and guidellm's ``mooncake`` read
Mooncake's lines with seconds (vllm 0.32, guidellm 0.8) and are told the block size by a flag; guidellm also takes a
``duration``.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from tracefile.exporters.loss import Loss, with_arrivals, with_lengths
from tracefile.importers.blocktraces import NO_PARENT, PARTIAL_BLOCK
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record, RequestId


class BlockIds:
    """Small numbers of a trace's blocks in order of first use, one for every started block.

    A block whose hash is unknown gets a number of its own: it is shared with none. So does a partial last block,
    unless the trace was imported with its id.
    """

    def __init__(self, meta: Meta, where: str) -> None:
        if meta.block_size is None:
            raise InputError(
                f"{where}: meta.block_size: missing; expected a trace with block hashes, or --to trie, "
                "aiperf-mooncake, otlp or vllm-vcr, which need none"
            )
        self.block_size = meta.block_size
        self._numbers: dict[int, int] = {}
        self._partial: dict[int, int] = {}
        self._next = 0

    def of(self, record: Record) -> list[int]:
        """Ids of a record's prompt, as many as it has started blocks."""
        full, rest = divmod(record.prompt_tokens or 0, self.block_size)
        known = (record.block_hashes or [])[: record.hashable_blocks]
        ids = [self._numbered(self._numbers, block) for block in known[:full]]
        ids += [self._fresh() for _ in range(full - len(ids))]
        if rest:
            partial = record.extra.get(PARTIAL_BLOCK)
            ids.append(self._numbered(self._partial, partial) if isinstance(partial, int) else self._fresh())
        return ids

    def _numbered(self, numbers: dict[int, int], block: int) -> int:
        number = numbers.get(block)
        if number is None:
            number = numbers[block] = self._fresh()
        return number

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1


Line = dict[str, Any]
NewLine = Callable[[Record, BlockIds], Line]


def by_arrival(
    records: Iterable[Record], ids: BlockIds, loss: Loss, new_line: Callable[[Record, BlockIds], Line]
) -> Iterator[bytes]:
    """Lines in order of arrival, which keep no record in memory but its line."""
    lines: list[tuple[float, int, bytes]] = []
    for record in with_arrivals(with_lengths(records, loss), loss):
        if record.block_hashes is None:
            loss.changed["have no hashes: their ids are shared with none"] += 1
        lines.append((record.arrival_ms or 0.0, loss.kept, msgspec.json.encode(new_line(record, ids))))
        loss.kept += 1
    return (line + b"\n" for _, _, line in sorted(lines))


def mooncake_line(record: Record, ids: BlockIds) -> Line:
    """Mooncake's line; whole milliseconds, as published."""
    return {"timestamp": round(record.arrival_ms or 0.0), **_lengths(record, ids)}


def timed_line(record: Record, ids: BlockIds) -> Line:
    """Line of vLLM's timed_trace."""
    return {"timestamp": _seconds(record.arrival_ms or 0.0), **_lengths(record, ids)}


def guidellm_line(record: Record, ids: BlockIds) -> Line:
    """Line of guidellm's Mooncake traces."""
    duration = {} if record.e2e_ms is None else {"duration": _seconds(record.e2e_ms)}
    return timed_line(record, ids) | duration


def bailian_lines() -> NewLine:
    """New function from records in finish order to Bailian's lines: chats are numbered, parents by their number."""
    numbers: dict[RequestId, int] = {}

    def line(record: Record, ids: BlockIds) -> Line:
        number = numbers[record.request_id] = len(numbers)
        parent = NO_PARENT if record.parent_id is None else numbers.get(record.parent_id, NO_PARENT)
        return {
            "chat_id": number,
            "parent_chat_id": parent,
            "timestamp": _seconds(record.arrival_ms or 0.0),
            **_lengths(record, ids),
            "type": str(record.extra.get("type", "text")),
            "turn": record.turn or 1,
        }

    return line


def _lengths(record: Record, ids: BlockIds) -> Line:
    return {"input_length": record.prompt_tokens, "output_length": record.output_tokens, "hash_ids": ids.of(record)}


def _seconds(ms: float) -> float:
    return round(ms / 1000, 6)
