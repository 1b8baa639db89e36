"""``tracefile convert --anonymize``: new hashes and ids, rounded times, no wall clock, no names, no free text.

Equal hashes and ids stay equal: each is replaced by its BLAKE2b under a random secret that is never stored. Lengths,
shared prefixes, order and rounded times are preserved, or the trace would be useless for prefix-cache analysis.
"""

import hashlib
import math
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from tracefile.hashing.branches import tail_key
from tracefile.records.schema import BlockHash, Engine, HashInfo, Meta, Record, RequestId, SessionId, Workload

MOMENTS = ("arrival_ms", "scheduled_ms")
ROUNDING_MS = 10.0
"""Rounding of every time, in ms."""
DURATIONS = ("first_byte_ms", "ttft_ms", "e2e_ms", "queue_ms", "think_ms")


@dataclass(slots=True)
class Pseudonyms:
    """Replacement block hashes and ids."""

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _blocks: dict[BlockHash, BlockHash] = field(default_factory=dict, repr=False)

    def block(self, block: BlockHash) -> BlockHash:
        pseudonym = self._blocks.get(block)
        if pseudonym is None:
            number = int.from_bytes(self._digest(b"block", (block % 2**64).to_bytes(8, "little")), "little")
            pseudonym = self._blocks[block] = BlockHash(number)
        return pseudonym

    def learn(self, record: Record) -> None:
        """Add the name of the record's partial last block: branches of later records may refer to it."""
        chain = record.chain()
        renamed = RequestId(self.name("request", record.request_id))
        self._blocks[tail_key(chain, record.request_id)] = tail_key([self.block(block) for block in chain], renamed)

    def name(self, kind: str, name: str) -> str:
        """Return 16 hex digits for an id; the same id of another ``kind`` gets unrelated digits."""
        return self._digest(kind.encode(), name.encode("utf-8", "surrogatepass")).hex()

    def _digest(self, kind: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self.secret, person=kind, digest_size=8).digest()


def anonymous_meta(meta: Meta) -> Meta:
    """Return the header without names, wall clock, digests and unknown keys; engine settings are preserved."""
    engine = None if meta.engine is None else msgspec.structs.replace(meta.engine, name=None, version=None, extra={})
    return Meta(
        source=meta.source,
        block_size=meta.block_size,
        hash=None if meta.hash is None else HashInfo(algorithm="anonymized", branches=meta.hash.branches),
        engine=None if engine == Engine() else engine,
        workload=None if meta.workload is None else Workload(pattern=meta.workload.pattern),
    )


def anonymize(
    records: Iterable[Record], pseudonyms: Pseudonyms, zero_ms: float, rounding_ms: float = ROUNDING_MS
) -> Iterator[Record]:
    """Yield anonymized records; times count from ``zero_ms`` and are rounded down to ``rounding_ms``."""
    for record in records:
        anonymized = _renamed(record, pseudonyms)
        for field_name in MOMENTS:
            if (at_ms := getattr(record, field_name)) is not None:
                setattr(anonymized, field_name, _floor(at_ms - zero_ms, rounding_ms))
        for field_name in DURATIONS:
            if (took_ms := getattr(record, field_name)) is not None:
                setattr(anonymized, field_name, _floor(took_ms, rounding_ms))
        anonymized.itl_ms = _gaps(record, rounding_ms)
        yield anonymized


def _renamed(record: Record, pseudonyms: Pseudonyms) -> Record:
    names, block = pseudonyms.name, pseudonyms.block
    prompt, output = record.block_hashes, record.output_block_hashes
    return msgspec.structs.replace(
        record,
        request_id=RequestId(names("request", record.request_id)),
        session_id=None if record.session_id is None else SessionId(names("session", record.session_id)),
        parent_id=None if record.parent_id is None else RequestId(names("request", record.parent_id)),
        block_hashes=None if prompt is None else [block(old) for old in prompt],
        output_block_hashes=None if output is None else [block(old) for old in output],
        branch_hash=None if record.branch_hash is None else block(record.branch_hash),
        model=None,
        lora=None if record.lora is None else names("lora", record.lora),
        upstream=None if record.upstream is None else names("upstream", record.upstream),
        headers=None,
        extra={},
    )


def _gaps(record: Record, rounding_ms: float) -> list[float]:
    """Return ITLs between rounded token times, so that their sum is the last token's rounded time."""
    at_ms = record.ttft_ms or 0.0
    gaps_ms = []
    for gap_ms in record.itl_ms:
        gaps_ms.append(round(_floor(at_ms + gap_ms, rounding_ms) - _floor(at_ms, rounding_ms), 6))
        at_ms += gap_ms
    return gaps_ms


def _floor(ms: float, rounding_ms: float) -> float:
    # A time written as 0.3 is a multiple of 0.1, though the floats' quotient is 2.9999….
    return round(math.floor(ms / rounding_ms + 1e-9) * rounding_ms, 6)
