"""Mooncake lines as AIPerf takes them: everything but a length may be left out, and ``session_id`` makes turns.

Source: ``MooncakeTrace`` in aiperf/dataset/loader/models.py (0.13): ``input_length``, ``output_length``, ``hash_ids``
(512-token blocks), ``timestamp`` (ms), ``session_id``, ``delay`` (ms after the answer before). A later line of a
session says only what is new: its prompt is all before it, answers included, and ``input_length`` more. Lines with
texts (``text_input``, ``messages``, ``payload``) say no lengths and are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from tracefile.importers.mooncake import BLOCK_SIZE
from tracefile.records.decoding import parse_object
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, HashInfo, Meta, Record, RequestId, SessionId

TEXTS = ("text_input", "messages", "payload")

Length = Annotated[int, msgspec.Meta(ge=0)]


class AiperfLine(msgspec.Struct, kw_only=True):
    """A line as published."""

    input_length: Length
    output_length: Length | None = None
    hash_ids: list[int] | None = None
    timestamp: float | None = None
    delay: Annotated[float, msgspec.Meta(ge=0)] | None = None
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
        self.meta = Meta(block_size=BLOCK_SIZE, hash=HashInfo(algorithm="mooncake"))
        self.warnings: Sequence[str] = ()
        self._count = 0
        self._sessions: dict[str, Before] = {}

    def decode(self, line: bytes, where: str) -> Record:
        found = _line(parse_object(line, where), where)
        self._count += 1
        before = self._sessions.get(found.session_id or "")
        request_id = RequestId(f"aiperf-{self._count}")
        prompt_tokens = found.input_length + (before.tokens if before else 0)
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
    for name in TEXTS:
        if name in found:
            raise InputError(f"{where}: {name}: a text; expected lengths, as input_length")
    try:
        return msgspec.convert(found, AiperfLine)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {error}; expected a Mooncake line as AIPerf takes them") from None


def _hashes(found: AiperfLine, where: str) -> list[BlockHash] | None:
    """The ids of a first turn's full blocks; null: it has none."""
    if found.hash_ids is None:
        return None
    full_blocks = found.input_length // BLOCK_SIZE
    if len(found.hash_ids) < full_blocks:
        raise InputError(
            f"{where}: hash_ids: {len(found.hash_ids)} ids; expected {full_blocks}, one for every full block"
        )
    return [BlockHash(block_id) for block_id in found.hash_ids[:full_blocks]]
