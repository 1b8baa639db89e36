"""Traces of lengths and block ids: Mooncake's lines. The format is that of ``tracefile.importers.blocktraces``."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from tracefile.exporters.loss import Loss, with_arrivals, with_lengths
from tracefile.importers.blocktraces import PARTIAL_BLOCK
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record


class BlockIds:
    """Small numbers of a trace's blocks in order of first use, one for every started block.

    A block whose hash is unknown gets a number of its own: it is shared with none. So does a partial last block,
    unless the trace was imported with its id.
    """

    def __init__(self, meta: Meta, where: str) -> None:
        if meta.block_size is None:
            raise InputError(
                f"{where}: meta.block_size: missing; expected a trace with block hashes, or --to trie or otlp, "
                "which need none"
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


def mooncake_lines(records: Iterable[Record], ids: BlockIds, loss: Loss) -> Iterator[bytes]:
    """Lines in order of arrival, which keep no record in memory but its line."""
    lines: list[tuple[float, int, bytes]] = []
    for record in with_arrivals(with_lengths(records, loss), loss):
        if record.block_hashes is None:
            loss.changed["have no hashes: their ids are shared with none"] += 1
        lines.append((record.arrival_ms or 0.0, loss.kept, msgspec.json.encode(_mooncake_line(record, ids))))
        loss.kept += 1
    return (line + b"\n" for _, _, line in sorted(lines))


def _mooncake_line(record: Record, ids: BlockIds) -> dict[str, Any]:
    """Mooncake's line; whole milliseconds, as published."""
    return {
        "timestamp": round(record.arrival_ms or 0.0),
        "input_length": record.prompt_tokens,
        "output_length": record.output_tokens,
        "hash_ids": ids.of(record),
    }
