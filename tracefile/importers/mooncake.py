"""Mooncake's published traces: arrival, lengths and 512-token block ids; no times of service, no sessions.

Source: the FAST'25 release of kvcache-ai/Mooncake, a line ``{"timestamp", "input_length", "output_length",
"hash_ids"}`` each. The ids stand for chained blocks (equal ids: equal prefixes), one for every started block: the
last may be partial, and a partial block is never a hit, so only the full ones become ``block_hashes``. The id of a
partial one is kept in ``extra`` under ``PARTIAL_BLOCK``, so that nothing published is lost.
"""

from collections.abc import Sequence

import msgspec

from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, HashInfo, Meta, Record, RequestId

BLOCK_SIZE = 512
PARTIAL_BLOCK = "partial_block_hash"
"""Key in ``Record.extra``: the id of the started last block. Absent: the prompt ends with a full one."""


class MooncakeLine(msgspec.Struct, kw_only=True):
    """A line as published."""

    timestamp: float
    """Arrival in ms from the trace's start."""
    input_length: int
    output_length: int
    hash_ids: list[int]


class MooncakeDecoder:
    """Mooncake lines as records; ids are ``mooncake-1``, ``-2``, … in file order, the same at every reading."""

    def __init__(self) -> None:
        self.meta = Meta(block_size=BLOCK_SIZE, hash=HashInfo(algorithm="mooncake"))
        self.warnings: Sequence[str] = ()
        self._count = 0
        self._decoder = msgspec.json.Decoder(MooncakeLine)

    def decode(self, line: bytes, where: str) -> Record:
        try:
            found = self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{where}: {error}; expected a Mooncake line") from None
        full_blocks = found.input_length // BLOCK_SIZE
        if found.input_length < 0 or found.output_length < 0:
            raise InputError(f"{where}: a negative length; expected input_length and output_length of 0 or more")
        if len(found.hash_ids) < full_blocks:
            raise InputError(
                f"{where}: hash_ids: {len(found.hash_ids)} ids; expected {full_blocks}, one for every full block"
            )
        self._count += 1
        partial = found.hash_ids[full_blocks : full_blocks + 1]
        return Record(
            request_id=RequestId(f"mooncake-{self._count}"),
            arrival_ms=found.timestamp,
            prompt_tokens=found.input_length,
            output_tokens=found.output_length,
            tokens_source="tokenizer",
            block_hashes=[BlockHash(block_id) for block_id in found.hash_ids[:full_blocks]],
            extra={PARTIAL_BLOCK: partial[0]} if partial else {},
        )
