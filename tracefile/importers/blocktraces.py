"""Published traces with lengths and block ids: Mooncake, and Bailian (Qwen).

Mooncake: the FAST'25 release of kvcache-ai/Mooncake, a line ``{"timestamp", "input_length", "output_length",
"hash_ids"}`` each; no sessions. The ids stand for chained 512-token blocks (equal ids: equal prefixes), one for every
started block: the last may be partial, and a partial block is never a hit, so only the full ones become
``block_hashes``. The id of a partial one is kept in ``extra`` under ``PARTIAL_BLOCK``, so that nothing is lost.

Bailian: alibaba-edu/qwen-bailian-usagetraces-anon, a line ``{"chat_id", "parent_chat_id", "timestamp",
"input_length", "output_length", "type", "turn", "hash_ids"}`` each: seconds, −1 for no parent, and an ``input_length``
that counts the whole prompt, the turns before included. Ids are hashes of 16-token blocks, not of what is before them
too, so they are chained here; that of a partial last block, which may be padded, is left out.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Annotated, cast

import msgspec
import xxhash

from tracefile.records.decoding import HEADER_START, NOT_JSON, decode_row
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Count, HashInfo, Meta, Record, RequestId, Seconds, SessionId, Time

if TYPE_CHECKING:
    pass

MOONCAKE_BLOCK_SIZE = 512
BAILIAN_BLOCK_SIZE = 16
NO_PARENT = -1
MOONCAKE_KEYS = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})
BAILIAN_KEYS = frozenset({"chat_id", "parent_chat_id", "input_length"})
PARTIAL_BLOCK = "partial_block_hash"
"""Key in ``Record.extra``: the id of the started last block. Absent: the prompt ends with a full one."""

Length = Count
BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Id that is chained here."""


class MooncakeLine(msgspec.Struct, kw_only=True):
    """A line as published."""

    timestamp: Time
    """Arrival in ms from the trace's start."""
    input_length: Length
    output_length: Length
    hash_ids: list[int]


class MooncakeDecoder:
    """Mooncake lines as records; ids are ``mooncake-1``, ``-2``, … in file order, the same at every reading."""

    def __init__(self) -> None:
        self.meta = Meta(block_size=MOONCAKE_BLOCK_SIZE, hash=HashInfo(algorithm="mooncake"))
        self.warnings: Sequence[str] = ()
        self._count = 0
        self._decoder = msgspec.json.Decoder(MooncakeLine)

    def decode_all(self, line: bytes, where: str) -> list[Record]:
        row = decode_row(self._decoder.decode, line, where, "a Mooncake line")
        split_ids(row.hash_ids, row.input_length, MOONCAKE_BLOCK_SIZE, where)
        self._count += 1
        return [_mooncake_record(row, self._count)]

    def decode_block(self, lines: list[bytes]) -> list[Record] | None:
        try:
            rows = list(map(self._decoder.decode, lines))
        except NOT_JSON:
            return None
        too_few = any(len(row.hash_ids) < row.input_length // MOONCAKE_BLOCK_SIZE for row in rows)
        if too_few or any(line.startswith(HEADER_START) for line in lines):
            return None
        self._count += len(rows)
        return list(map(_mooncake_record, rows, count(self._count - len(rows) + 1)))


def _mooncake_record(row: MooncakeLine, number: int) -> Record:
    full = row.input_length // MOONCAKE_BLOCK_SIZE
    return Record(
        request_id=RequestId(f"mooncake-{number}"),
        arrival_ms=row.timestamp,
        prompt_tokens=row.input_length,
        output_tokens=row.output_length,
        tokens_source="tokenizer",
        block_hashes=cast(list[BlockHash], row.hash_ids[:full]),
        extra={PARTIAL_BLOCK: row.hash_ids[full]} if len(row.hash_ids) > full else {},
    )


def split_ids(
    ids: list[int], tokens: int, block_size: int, where: str, name: str = "hash_ids"
) -> tuple[list[int], list[int]]:
    """Split ``ids`` after those of the full blocks; raises InputError if there are fewer."""
    full_blocks = tokens // block_size
    if len(ids) < full_blocks:
        raise InputError(f"{where}: {name}: {len(ids)} ids; expected {full_blocks}, one for every full block")
    return ids[:full_blocks], ids[full_blocks:]


class BailianLine(msgspec.Struct, kw_only=True):
    """A line as published."""

    chat_id: int
    parent_chat_id: int
    timestamp: Seconds
    """Arrival in seconds from the trace's start."""
    input_length: Length
    output_length: Length
    type: str | None = None
    turn: Count | None = None
    hash_ids: list[BlockId]


class BailianDecoder:
    """Bailian lines as records, under ids ``bailian-`` and their chat's number; a session is named by its first."""

    def __init__(self) -> None:
        self.meta = Meta(block_size=BAILIAN_BLOCK_SIZE, hash=HashInfo(algorithm="bailian"))
        self.warnings: Sequence[str] = ()
        self._roots: dict[int, int] = {}
        self._decoder = msgspec.json.Decoder(BailianLine)

    def decode_all(self, line: bytes, where: str) -> list[Record]:
        found = decode_row(self._decoder.decode, line, where, "a Bailian line")
        ids, _ = split_ids(found.hash_ids, found.input_length, BAILIAN_BLOCK_SIZE, where)
        if found.chat_id in self._roots:
            raise InputError(f"{where}: chat_id: {found.chat_id} again; expected unique ids")
        has_parent = found.parent_chat_id != NO_PARENT
        root = self._roots.get(found.parent_chat_id, found.parent_chat_id) if has_parent else found.chat_id
        self._roots[found.chat_id] = root
        record = Record(
            request_id=_name(found.chat_id),
            session_id=SessionId(_name(root)),
            session_source="explicit",
            parent_id=_name(found.parent_chat_id) if has_parent else None,
            turn=found.turn,
            arrival_ms=found.timestamp * 1000,
            prompt_tokens=found.input_length,
            output_tokens=found.output_length,
            tokens_source="usage",
            block_hashes=list(chained(ids)),
            extra={} if found.type is None else {"type": found.type},
        )
        return [record]


def chained(block_ids: Sequence[int], before: int = 0) -> Iterator[BlockHash]:
    """Each block's id with all before it: equal only where the prompts, and ``before``, are equal up to there."""
    for block_id in block_ids:
        before = xxhash.xxh3_64_intdigest(before.to_bytes(8, "little") + block_id.to_bytes(8, "little"))
        yield BlockHash(before)


def _name(chat_id: int) -> RequestId:
    return RequestId(f"bailian-{chat_id}")
