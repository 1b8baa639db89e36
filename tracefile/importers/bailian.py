"""Alibaba's Bailian traces (Qwen): arrivals, lengths, conversations and 16-token block ids; no times of service.

Source: alibaba-edu/qwen-bailian-usagetraces-anon, a line ``{"chat_id", "parent_chat_id", "timestamp", "input_length",
"output_length", "type", "turn", "hash_ids"}`` each: seconds, −1 for no parent, and an ``input_length`` that counts the
whole prompt, the turns before included. Ids are hashes of blocks, not of what is before them too, so they are chained
here; there is one for every started block, and that of a partial last one, which may be padded, is left out.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import xxhash

from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, HashInfo, Meta, Record, RequestId, SessionId

BLOCK_SIZE = 16
NO_PARENT = -1
KEYS = ("chat_id", "parent_chat_id", "input_length")

Length = Annotated[int, msgspec.Meta(ge=0)]


class BailianLine(msgspec.Struct, kw_only=True):
    """A line as published."""

    chat_id: int
    parent_chat_id: int
    timestamp: float
    """Arrival in seconds from the trace's start."""
    input_length: Length
    output_length: Length
    type: str | None = None
    turn: int | None = None
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]]


class BailianDecoder:
    """Bailian lines as records, under ids ``bailian-`` and their chat's number; a session is named by its first."""

    def __init__(self) -> None:
        self.meta = Meta(block_size=BLOCK_SIZE, hash=HashInfo(algorithm="bailian"))
        self.warnings: Sequence[str] = ()
        self._roots: dict[int, int] = {}
        self._decoder = msgspec.json.Decoder(BailianLine)

    def decode(self, line: bytes, where: str) -> Record:
        try:
            found = self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{where}: {error}; expected a Bailian line") from None
        full_blocks = found.input_length // BLOCK_SIZE
        if len(found.hash_ids) < full_blocks:
            raise InputError(
                f"{where}: hash_ids: {len(found.hash_ids)} ids; expected {full_blocks}, one for every full block"
            )
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
            block_hashes=list(chained(found.hash_ids[:full_blocks])),
            extra={} if found.type is None else {"type": found.type},
        )


def chained(block_ids: Sequence[int]) -> Iterator[BlockHash]:
    """Each block's id with all before it: equal only where the prompts are equal up to there."""
    before = 0
    for block_id in block_ids:
        before = xxhash.xxh3_64_intdigest(before.to_bytes(8, "little") + block_id.to_bytes(8, "little"))
        yield BlockHash(before)


def _name(chat_id: int) -> RequestId:
    return RequestId(f"bailian-{chat_id}")
