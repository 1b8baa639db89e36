"""Mooncake traces (the FAST'25 release of kvcache-ai/Mooncake), read and written.

Each request is a line ``{"timestamp", "input_length", "output_length", "hash_ids"}``; there are no sessions. The ids
are of chained 512-token blocks (equal ids: equal prefixes), the partial last block included. A partial block is never a
prefix hit, so only full blocks become ``block_hashes``. The id of a partial block is stored in ``extra`` under
``PARTIAL_BLOCK``, so that a conversion back loses nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, Final

import msgspec

from tracefile.records.decoding import HEADER_START, NOT_JSON, RecordColumns
from tracefile.records.errors import USAGE_ADVICE, InputError
from tracefile.records.schema import BlockHash, Count, HashInfo, Meta, Record, Time

MOONCAKE_BLOCK_SIZE = 512
MOONCAKE_KEYS = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})
PARTIAL_BLOCK = "partial_block_hash"
"""Key in ``Record.extra``: the id of the partial last block. Absent: the prompt ends with a full block."""

NO_LENGTHS: Final = "left out: no prompt_tokens or no output_tokens"
NO_ARRIVAL: Final = "left out: no arrival_ms"
NO_HASHES: Final = "have no hashes: written with unique ids"
LOST: Final = "lost: sessions, statuses, times of tokens, fractions of a millisecond"


class MooncakeLine(msgspec.Struct, kw_only=True, gc=False):
    """A request in the published format."""

    timestamp: Time
    """Arrival in ms from the trace's start."""
    input_length: Count
    output_length: Count
    hash_ids: list[BlockHash]


class MooncakeDecoder:
    """Decodes Mooncake lines; request ids are ``mooncake-1``, ``-2``, … in file order."""

    def __init__(self) -> None:
        self.meta = Meta(block_size=MOONCAKE_BLOCK_SIZE, hash=HashInfo(algorithm="mooncake"))
        self._count = 0
        self._decoder = msgspec.json.Decoder(MooncakeLine)

    def decode(self, line: bytes, where: str) -> Record:
        try:
            row = self._decoder.decode(line)
        except NOT_JSON as error:
            raise InputError(f"{where}: {error}; expected a Mooncake line") from None
        columns = self._columns([row])
        if columns is None:
            full = row.input_length // MOONCAKE_BLOCK_SIZE
            raise InputError(f"{where}: hash_ids: {len(row.hash_ids)} ids; expected {full}, an id for every full block")
        return columns.record(0)

    def decode_block(self, lines: list[bytes]) -> RecordColumns | None:
        if any(line.startswith(HEADER_START) for line in lines):
            return None
        try:
            return self._columns(list(map(self._decoder.decode, lines)))
        except NOT_JSON:
            return None

    def _columns(self, rows: list[MooncakeLine]) -> RecordColumns | None:
        """Return the records of rows, with partial blocks in ``extra``; None: a row has too few ids."""
        partial: list[BlockHash | None] = []
        for row in rows:
            full = row.input_length // MOONCAKE_BLOCK_SIZE
            if len(row.hash_ids) < full:
                return None
            partial.append(row.hash_ids[full] if len(row.hash_ids) > full else None)
            del row.hash_ids[full:]
        first, self._count = self._count + 1, self._count + len(rows)
        columns: dict[str, list[Any]] = {
            "request_id": [f"mooncake-{number}" for number in range(first, self._count + 1)],
            "arrival_ms": [row.timestamp for row in rows],
            "prompt_tokens": [row.input_length for row in rows],
            "output_tokens": [row.output_length for row in rows],
            "tokens_source": ["tokenizer"] * len(rows),
            "block_hashes": [row.hash_ids for row in rows],
            "extra": partial,
        }
        return RecordColumns(columns, PARTIAL_BLOCK)


def usual_block_size(meta: Meta) -> int | None:
    """Return Mooncake's block size if the trace's block size divides it."""
    return None if meta.block_size is None or MOONCAKE_BLOCK_SIZE % meta.block_size else MOONCAKE_BLOCK_SIZE


def mooncake_lines(records: Iterable[Record], meta: Meta, where: str, differences: Counter[str]) -> Iterator[bytes]:
    """Yield lines in order of arrival, with times in integer milliseconds; holds all lines in memory.

    ``differences`` counts, by reason, requests that are left out or lose a field. Raises InputError if the trace has no
    block size, or no request can be written.
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
    """Return a function that numbers a record's blocks, partial last block included, in order of first use.

    A block without a hash gets a unique number. So does a partial block, unless the trace was imported with its id.
    """
    fresh = count()
    numbers: defaultdict[tuple[bool, int], int] = defaultdict(lambda: next(fresh))
    """Number of each block, by (is full, hash or id)."""

    def block_ids(record: Record) -> list[int]:
        full, partial_tokens = divmod(record.prompt_tokens or 0, block_size)
        hashes = (record.block_hashes or [])[: record.hashable_blocks][:full]
        ids = [numbers[True, block] for block in hashes] + [next(fresh) for _ in range(full - len(hashes))]
        if partial_tokens:
            partial = record.extra.get(PARTIAL_BLOCK)
            ids.append(numbers[False, partial] if isinstance(partial, int) else next(fresh))
        return ids

    return block_ids
