"""Traces as Mooncake's lines, whose format is that of ``tracefile.importers.blocktraces``.

Requests that a line cannot hold are left out and counted by reason.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tracefile.importers.blocktraces import MOONCAKE_BLOCK_SIZE, PARTIAL_BLOCK
from tracefile.records.errors import USAGE_ADVICE, InputError
from tracefile.records.schema import Meta, Record

NO_LENGTHS: Final = "left out: no prompt_tokens or no output_tokens"
NO_ARRIVAL: Final = "left out: no arrival_ms"
NO_HASHES: Final = "have no hashes: their ids are shared with none"
LOST: Final = "lost: sessions, statuses, times of tokens, fractions of a millisecond"


@dataclass(slots=True)
class Account:
    """Account of an export."""

    kept: int = 0
    differences: Counter[str] = field(default_factory=Counter)
    """Requests without a line, and requests whose line differs from the record, by reason."""


class BlockIds:
    """Small numbers of a trace's blocks in order of first use, one for every started block.

    A block whose hash is unknown gets a number of its own: it is shared with none. So does a partial last block,
    unless the trace was imported with its id.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._numbers: dict[tuple[bool, int], int] = {}
        """By whether the block is full, and its hash or id."""
        self._next = 0

    def of(self, record: Record) -> list[int]:
        """Return the ids of a record's prompt, as many as it has started blocks."""
        full, rest = divmod(record.prompt_tokens or 0, self.block_size)
        known = (record.block_hashes or [])[: record.hashable_blocks][:full]
        ids = [self._numbered(True, block) for block in known]
        ids += [self._fresh() for _ in range(full - len(ids))]
        if rest:
            partial = record.extra.get(PARTIAL_BLOCK)
            ids.append(self._numbered(False, partial) if isinstance(partial, int) else self._fresh())
        return ids

    def _numbered(self, is_full: bool, block: int) -> int:
        number = self._numbers.get((is_full, block))
        if number is None:
            number = self._numbers[is_full, block] = self._fresh()
        return number

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1


def usual_block_size(meta: Meta) -> int | None:
    """Return Mooncake's block size, if the trace's divides it."""
    return None if meta.block_size is None or MOONCAKE_BLOCK_SIZE % meta.block_size else MOONCAKE_BLOCK_SIZE


def mooncake_lines(records: Iterable[Record], meta: Meta, where: str, account: Account) -> Iterator[bytes]:
    """Yield lines by arrival, in whole milliseconds as published; memory: the lines.

    Raises InputError if the trace has no block size, or none of its requests can be written.
    """
    if meta.block_size is None:
        raise InputError(f"{where}: meta.block_size: missing; expected a trace with block hashes")
    ids = BlockIds(meta.block_size)
    lines: list[tuple[float, int, bytes]] = []
    for record in records:
        if record.prompt_tokens is None or record.output_tokens is None:
            account.differences[NO_LENGTHS] += 1
        elif record.arrival_ms is None:
            account.differences[NO_ARRIVAL] += 1
        else:
            account.differences[NO_HASHES] += record.block_hashes is None
            line = {
                "timestamp": round(record.arrival_ms),
                "input_length": record.prompt_tokens,
                "output_length": record.output_tokens,
                "hash_ids": ids.of(record),
            }
            lines.append((record.arrival_ms, account.kept, msgspec.json.encode(line)))
            account.kept += 1
    if not lines:
        reasons = ", ".join(account.differences) or "the trace has no requests"
        advice = USAGE_ADVICE if NO_LENGTHS in account.differences else "expected other requests"
        raise InputError(f"{where}: nothing to write as mooncake: {reasons}; {advice}")
    return (line + b"\n" for _, _, line in sorted(lines))
