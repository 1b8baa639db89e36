"""Traces as Mooncake's lines, whose format is that of ``tracefile.importers.blocktraces``."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Final

import msgspec

from tracefile.importers.blocktraces import MOONCAKE_BLOCK_SIZE, PARTIAL_BLOCK
from tracefile.records.errors import USAGE_ADVICE, InputError
from tracefile.records.schema import Meta, Record

NO_LENGTHS: Final = "left out: no prompt_tokens or no output_tokens"
NO_ARRIVAL: Final = "left out: no arrival_ms"
NO_HASHES: Final = "have no hashes: their ids are shared with none"
LOST: Final = "lost: sessions, statuses, times of tokens, fractions of a millisecond"


def usual_block_size(meta: Meta) -> int | None:
    """Return Mooncake's block size, if the trace's divides it."""
    return None if meta.block_size is None or MOONCAKE_BLOCK_SIZE % meta.block_size else MOONCAKE_BLOCK_SIZE


def mooncake_lines(records: Iterable[Record], meta: Meta, where: str, differences: Counter[str]) -> Iterator[bytes]:
    """Yield lines by arrival, in whole milliseconds as published; memory: the lines.

    ``differences`` counts requests without a line, and those whose line differs from the record, by reason. Raises
    InputError if the trace has no block size, or none of its requests can be written.
    """
    if meta.block_size is None:
        raise InputError(f"{where}: meta.block_size: missing; expected a trace with block hashes")
    block_ids = numbered_blocks(meta.block_size)
    lines: list[tuple[float, int, bytes]] = []
    for record in records:
        if record.prompt_tokens is None or record.output_tokens is None:
            differences[NO_LENGTHS] += 1
        elif record.arrival_ms is None:
            differences[NO_ARRIVAL] += 1
        else:
            differences[NO_HASHES] += record.block_hashes is None
            line = {
                "timestamp": round(record.arrival_ms),
                "input_length": record.prompt_tokens,
                "output_length": record.output_tokens,
                "hash_ids": block_ids(record),
            }
            lines.append((record.arrival_ms, len(lines), msgspec.json.encode(line)))
    if not lines:
        reasons = ", ".join(differences) or "the trace has no requests"
        advice = USAGE_ADVICE if NO_LENGTHS in differences else "expected other requests"
        raise InputError(f"{where}: nothing to write as mooncake: {reasons}; {advice}")
    return (line + b"\n" for _, _, line in sorted(lines))


def numbered_blocks(block_size: int) -> Callable[[Record], list[int]]:
    """Return a function that numbers a record's blocks in order of first use, one for every started block.

    A block whose hash is unknown gets a number of its own: it is shared with none. So does a partial last block,
    unless the trace was imported with its id.
    """
    fresh = count()
    numbers: defaultdict[tuple[bool, int], int] = defaultdict(lambda: next(fresh))
    """By whether the block is full, and its hash or id."""

    def block_ids(record: Record) -> list[int]:
        full, rest = divmod(record.prompt_tokens or 0, block_size)
        known = (record.block_hashes or [])[: record.hashable_blocks][:full]
        ids = [numbers[True, block] for block in known] + [next(fresh) for _ in range(full - len(known))]
        if rest:
            partial = record.extra.get(PARTIAL_BLOCK)
            ids.append(numbers[False, partial] if isinstance(partial, int) else next(fresh))
        return ids

    return block_ids
