"""``tracefile convert --anonymize``: new hashes and ids, rounded times, no wall clock, no names, no free text.

Equal stays equal and different stays different: hashes and ids go through BLAKE2b under a secret that is drawn for the
run and kept nowhere. Lengths, sharing, order and times to the rounding stay: a trace is of use for nothing else.
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
"""Grain of every time."""
DURATIONS = ("first_byte_ms", "ttft_ms", "e2e_ms", "queue_ms", "think_ms")


@dataclass(slots=True)
class Pseudonyms:
    """New hashes and ids by old ones."""

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _blocks: dict[BlockHash, BlockHash] = field(default_factory=dict, repr=False)

    def block(self, block: BlockHash) -> BlockHash:
        found = self._blocks.get(block)
        if found is None:
            number = int.from_bytes(self._digest(b"block", (block % 2**64).to_bytes(8, "little")), "little")
            found = self._blocks[block] = BlockHash(number)
        return found

    def learn(self, record: Record) -> None:
        """Note the name of the record's unfilled last block, to which later records' branches may point."""
        chain = record.chain()
        renamed = RequestId(self.name("request", record.request_id))
        self._blocks[tail_key(chain, record.request_id)] = tail_key([self.block(found) for found in chain], renamed)

    def name(self, kind: str, name: str) -> str:
        """16 hex digits for an id; unrelated across kinds."""
        return self._digest(kind.encode(), name.encode("utf-8", "surrogatepass")).hex()

    def _digest(self, kind: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self.secret, person=kind, digest_size=8).digest()


def anonymous_meta(meta: Meta) -> Meta:
    """Return the header without names, wall clock, digests and unknown keys; the engine's settings stay."""
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
    """Records under new names; times count from ``zero_ms``, every moment rounded down to ``rounding_ms``."""
    for record in records:
        made = _renamed(record, pseudonyms)
        for field_name in MOMENTS:
            if (at_ms := getattr(record, field_name)) is not None:
                setattr(made, field_name, _floor(at_ms - zero_ms, rounding_ms))
        for field_name in DURATIONS:
            if (took_ms := getattr(record, field_name)) is not None:
                setattr(made, field_name, _floor(took_ms, rounding_ms))
        made.itl_ms = _gaps(record, rounding_ms)
        yield made


def _renamed(record: Record, pseudonyms: Pseudonyms) -> Record:
    names, block = pseudonyms.name, pseudonyms.block
    prompt, output = record.block_hashes, record.output_block_hashes
    return msgspec.structs.replace(
        record,
        request_id=RequestId(names("request", record.request_id)),
        session_id=None if record.session_id is None else SessionId(names("session", record.session_id)),
        parent_id=None if record.parent_id is None else RequestId(names("request", record.parent_id)),
        block_hashes=None if prompt is None else [block(found) for found in prompt],
        output_block_hashes=None if output is None else [block(found) for found in output],
        branch_hash=None if record.branch_hash is None else block(record.branch_hash),
        model=None,
        lora=None if record.lora is None else names("lora", record.lora),
        upstream=None if record.upstream is None else names("upstream", record.upstream),
        headers=None,
        extra={},
    )


def _gaps(record: Record, rounding_ms: float) -> list[float]:
    """Gaps between rounded moments, so that they still add up to the last token's."""
    at_ms = record.ttft_ms or 0.0
    gaps_ms = []
    for gap_ms in record.itl_ms:
        gaps_ms.append(round(_floor(at_ms + gap_ms, rounding_ms) - _floor(at_ms, rounding_ms), 6))
        at_ms += gap_ms
    return gaps_ms


def _floor(ms: float, rounding_ms: float) -> float:
    # A time written as 0.3 is a multiple of 0.1, though the floats' quotient is 2.9999….
    return round(math.floor(ms / rounding_ms + 1e-9) * rounding_ms, 6)
