"""Published traces with lengths and block ids: Mooncake, Mooncake lines as AIPerf takes them, and Bailian (Qwen).

Mooncake: the FAST'25 release of kvcache-ai/Mooncake, a line ``{"timestamp", "input_length", "output_length",
"hash_ids"}`` each; no sessions. The ids stand for chained 512-token blocks (equal ids: equal prefixes), one for every
started block: the last may be partial, and a partial block is never a hit, so only the full ones become
``block_hashes``. The id of a partial one is kept in ``extra`` under ``PARTIAL_BLOCK``, so that nothing is lost.

AIPerf: ``MooncakeTrace`` in aiperf/dataset/loader/models.py (0.13): everything but a length may be left out, and there
are ``session_id`` and ``delay`` (ms after the answer before). A later line of a session says only what is new: its
prompt is all before it, answers included, and ``input_length`` more. Lines with texts (``text_input``, ``messages``,
``payload``) say no lengths and are refused.

Bailian: alibaba-edu/qwen-bailian-usagetraces-anon, a line ``{"chat_id", "parent_chat_id", "timestamp",
"input_length", "output_length", "type", "turn", "hash_ids"}`` each: seconds, −1 for no parent, and an ``input_length``
that counts the whole prompt, the turns before included. Ids are hashes of 16-token blocks, not of what is before them
too, so they are chained here; that of a partial last block, which may be padded, is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import xxhash

from tracefile.records.decoding import (
    HEADER_START,
    NOT_JSON,
    checked_prompt,
    convert_row,
    decode_row,
    parse_object,
)
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Count, HashInfo, Meta, Record, RequestId, Seconds, SessionId, Time

if TYPE_CHECKING:
    from tracefile.records.batches import Batch

MOONCAKE_BLOCK_SIZE = 512
BAILIAN_BLOCK_SIZE = 16
NO_PARENT = -1
BAILIAN_KEYS = ("chat_id", "parent_chat_id", "input_length")
PARTIAL_BLOCK = "partial_block_hash"
"""Key in ``Record.extra``: the id of the started last block. Absent: the prompt ends with a full one."""


AIPERF_TEXTS = ("text_input", "messages", "payload")

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

    def decode(self, line: bytes, where: str) -> Record:
        row = decode_row(self._decoder.decode, line, where, "a Mooncake line")
        split_ids(row.hash_ids, row.input_length, MOONCAKE_BLOCK_SIZE, where)
        self._count += 1
        return _mooncake_record(row, self._count)

    def decode_block(self, lines: list[bytes]) -> list[Record] | None:
        rows = self._plain_rows(lines)
        if rows is None:
            return None
        self._count += len(rows)
        return list(map(_mooncake_record, rows, count(self._count - len(rows) + 1)))

    def decode_batch(self, lines: list[bytes]) -> "Batch | None":
        rows = self._plain_rows(lines)
        if rows is None:
            return None
        first, self._count = self._count + 1, self._count + len(rows)
        return _mooncake_batch(rows, first)

    def _plain_rows(self, lines: list[bytes]) -> list[MooncakeLine] | None:
        """Return the rows of lines that are all records without faults; else null."""
        try:
            rows = list(map(self._decoder.decode, lines))
        except NOT_JSON:
            return None
        if any(len(row.hash_ids) < row.input_length // MOONCAKE_BLOCK_SIZE for row in rows):
            return None
        return None if any(line.startswith(HEADER_START) for line in lines) else rows


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


def _mooncake_batch(rows: list[MooncakeLine], first: int) -> "Batch":
    """Return rows as columns; ``first``: number of the first."""
    # Commands that read headers only must not import NumPy.
    from tracefile.records.batches import LeanBatch, prompt_chains  # noqa: PLC0415

    columns: dict[str, list[Any]] = {
        "request_id": [f"mooncake-{number}" for number in range(first, first + len(rows))],
        "arrival_ms": [row.timestamp for row in rows],
        "prompt_tokens": [row.input_length for row in rows],
        "output_tokens": [row.output_length for row in rows],
        "tokens_source": ["tokenizer"] * len(rows),
    }
    chains = prompt_chains(row.hash_ids[: row.input_length // MOONCAKE_BLOCK_SIZE] for row in rows)
    return LeanBatch(columns, chains, lambda places: [_mooncake_record(rows[at], first + at) for at in places])


class AiperfLine(msgspec.Struct, kw_only=True):
    """A line as published."""

    input_length: Length
    output_length: Length | None = None
    hash_ids: list[int] | None = None
    timestamp: Time | None = None
    delay: Annotated[float, msgspec.Meta(ge=0, le=1e15)] | None = None
    session_id: str | None = None


@dataclass(slots=True)
class Before:
    """A session up to a turn."""

    request_id: RequestId
    turn: int
    tokens: int
    """Its prompt and its answer."""
    hashes: list[BlockHash] | None
    """Of its first turn's full blocks, with which every later prompt begins."""


class AiperfMooncakeDecoder:
    """Lines as records; ids are ``aiperf-1``, ``-2``, … in file order. A turn without a timestamp has no arrival."""

    def __init__(self) -> None:
        self.meta = Meta(block_size=MOONCAKE_BLOCK_SIZE, hash=HashInfo(algorithm="mooncake"))
        self.warnings: Sequence[str] = ()
        self._count = 0
        self._sessions: dict[str, Before] = {}

    def decode(self, line: bytes, where: str) -> Record:
        found = _line(parse_object(line, where), where)
        self._count += 1
        before = self._sessions.get(found.session_id or "")
        request_id = RequestId(f"aiperf-{self._count}")
        prompt_tokens = checked_prompt(found.input_length + (before.tokens if before else 0), where)
        hashes = before.hashes if before else _hashes(found, where)
        turn = before.turn + 1 if before else 1
        if found.session_id is not None:
            tokens = prompt_tokens + (found.output_length or 0)
            self._sessions[found.session_id] = Before(request_id, turn, tokens, hashes)
        return Record(
            request_id=request_id,
            session_id=None if found.session_id is None else SessionId(found.session_id),
            session_source=None if found.session_id is None else "explicit",
            parent_id=before.request_id if before else None,
            turn=None if found.session_id is None else turn,
            arrival_ms=found.timestamp,
            think_ms=(found.delay or 0.0) if before and found.timestamp is None else None,
            prompt_tokens=prompt_tokens,
            output_tokens=found.output_length,
            tokens_source="tokenizer",
            block_hashes=hashes,
            hashable_blocks=len(hashes) if before and hashes is not None else None,
        )


def _line(found: dict[str, Any], where: str) -> AiperfLine:
    for name in AIPERF_TEXTS:
        if name in found:
            raise InputError(f"{where}: {name}: a text; expected lengths, as input_length")
    return convert_row(found, AiperfLine, where, "a Mooncake line as AIPerf takes them")


def _hashes(found: AiperfLine, where: str) -> list[BlockHash] | None:
    """The ids of a first turn's full blocks; null: it has none."""
    if found.hash_ids is None:
        return None
    ids, _ = split_ids(found.hash_ids, found.input_length, MOONCAKE_BLOCK_SIZE, where)
    return [BlockHash(block_id) for block_id in ids]


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

    def decode(self, line: bytes, where: str) -> Record:
        found = decode_row(self._decoder.decode, line, where, "a Bailian line")
        ids, _ = split_ids(found.hash_ids, found.input_length, BAILIAN_BLOCK_SIZE, where)
        if found.chat_id in self._roots:
            raise InputError(f"{where}: chat_id: {found.chat_id} again; expected unique ids")
        has_parent = found.parent_chat_id != NO_PARENT
        root = self._roots.get(found.parent_chat_id, found.parent_chat_id) if has_parent else found.chat_id
        self._roots[found.chat_id] = root
        return Record(
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


def chained(block_ids: Sequence[int], before: int = 0) -> Iterator[BlockHash]:
    """Each block's id with all before it: equal only where the prompts, and ``before``, are equal up to there."""
    for block_id in block_ids:
        before = xxhash.xxh3_64_intdigest(before.to_bytes(8, "little") + block_id.to_bytes(8, "little"))
        yield BlockHash(before)


def _name(chat_id: int) -> RequestId:
    return RequestId(f"bailian-{chat_id}")
