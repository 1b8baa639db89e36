"""A captured trace, read and checked for replay: what to send of it, and what cannot be sent."""

import os
import sys
from collections import Counter
from dataclasses import dataclass

from tracefile import BlockHash, InputError, Meta, Record, RequestId, TraceReader, infer_sessions, open_trace
from wire.answer import GENERATING

HTTP_ERROR = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One request to send again."""

    record: Record
    offset_ms: float
    """From the trace's first arrival."""
    hashes: list[BlockHash]
    """The chain as far as it is true; []: nothing of it is known to be shared."""
    prompt_tokens: int
    output_tokens: int
    """How many to generate: for a request that was cut short, as many as had come, so that the engine does as much."""
    end_ms: float | None
    """When it ended, from the trace's first arrival; null: unknown."""


@dataclass(frozen=True, slots=True)
class Capture:
    """The requests in order of arrival, and what is left out."""

    path: str
    meta: Meta
    block_size: int
    """Tokens in a hashed block; 1 where the trace has no hashes and no block to speak of."""
    requests: list[Captured]
    left_out: Counter[str]
    """Requests that cannot be sent again, by reason."""

    @property
    def has_hashes(self) -> bool:
        """Whether the trace knows anything of sharing."""
        return any(request.record.block_hashes is not None for request in self.requests)


def load_capture(path: str | os.PathLike[str], *, limit: int | None = None, sessions: bool = False) -> Capture:
    """Read a trace for replay; raises InputError naming the line of a record that makes no sense.

    ``limit`` keeps the first so many by arrival. ``sessions`` infers who continued whom where the trace does not say.
    """
    left_out: Counter[str] = Counter()
    with open_trace(path) as reader:
        block_size = reader.meta.block_size
        kept: list[Record] = []
        lines: dict[RequestId, int] = {}
        for record in reader:
            where = reader.where()
            if record.request_id in lines:
                raise InputError(f"{where}: request_id: as on line {lines[record.request_id]}; expected unique ids")
            lines[record.request_id] = reader.line
            _check(record, block_size, where)
            reason = why_not(record, block_size)
            if reason is None:
                kept.append(record)
            else:
                left_out[reason] += 1
        for warning in reader.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        _check_parents(kept, lines, reader)
        if not kept:
            raise InputError(f"{reader.path}: no request that can be sent; {dict(left_out) or 'it has no records'}")
        if sessions and block_size is not None and all(record.parent_id is None for record in kept):
            kept = infer_sessions(kept, block_size).records
        requests = _requests(kept, block_size or 1)[:limit]
        return Capture(reader.path, reader.meta, block_size or 1, requests, left_out)


def why_not(record: Record, block_size: int | None) -> str | None:
    """Why a request cannot be sent again; null: it can.

    What the engine refused (HTTP 4xx, 5xx) or never saw took none of its time, so it is left out; what was cut short
    after the engine had it is sent with as many output tokens as had come.
    """
    if record.endpoint is not None and record.endpoint not in GENERATING:
        return "no generation: embeddings, scores, audio"
    if record.status == "error" and record.ttft_ms is None and not record.output_tokens:
        refused = record.http_status is not None and record.http_status >= HTTP_ERROR
        return "refused in the capture" if refused else "never reached the engine in the capture"
    if record.arrival_ms is None:
        return "no arrival time"
    if record.prompt_tokens is None and not (record.block_hashes and block_size):
        return "no prompt length"
    return None


def output_to_generate(record: Record) -> int:
    """How many tokens to generate: as recorded, else as many as were seen to come; at least one."""
    if record.output_tokens:
        return record.output_tokens
    if record.status == "ok" and record.output_tokens is None and record.max_tokens:
        return record.max_tokens
    return max(1, sum(record.itl_tokens) + (record.ttft_ms is not None))


def _requests(records: list[Record], block_size: int) -> list[Captured]:
    ordered = sorted(records, key=lambda record: record.arrival_ms or 0.0)
    first_ms = ordered[0].arrival_ms or 0.0
    return [_captured(record, first_ms, block_size) for record in ordered]


def _captured(record: Record, first_ms: float, block_size: int) -> Captured:
    hashes = (record.block_hashes or [])[: record.hashable_blocks]
    end_ms = record.end_ms()
    return Captured(
        record=record,
        offset_ms=(record.arrival_ms or 0.0) - first_ms,
        hashes=hashes,
        prompt_tokens=len(hashes) * block_size if record.prompt_tokens is None else record.prompt_tokens,
        output_tokens=output_to_generate(record),
        end_ms=None if end_ms is None else end_ms - first_ms,
    )


def _check(record: Record, block_size: int | None, where: str) -> None:
    """Raise InputError for lengths and times that cannot be."""
    for name in ("prompt_tokens", "output_tokens", "e2e_ms"):
        value = getattr(record, name)
        if value is not None and value < 0:
            raise InputError(f"{where}: {name}: {value}; expected 0 or more")
    hashes = record.block_hashes
    if hashes and block_size is None:
        raise InputError(f"{where}: block_hashes: present; expected meta.block_size with them")
    if hashes and block_size and record.prompt_tokens is not None and len(hashes) * block_size > record.prompt_tokens:
        raise InputError(
            f"{where}: block_hashes: {len(hashes)} blocks of {block_size} tokens; "
            f"expected at most {record.prompt_tokens // block_size} in a prompt of {record.prompt_tokens} tokens"
        )
    if record.prompt_tokens == 0:
        raise InputError(f"{where}: prompt_tokens: 0; expected 1 or more")


def _check_parents(records: list[Record], lines: dict[RequestId, int], reader: TraceReader) -> None:
    """Raise InputError for a chain of parents that comes back to itself; warn of parents that are not there."""
    parents = {record.request_id: record.parent_id for record in records}
    sound: set[RequestId] = set()
    for start in parents:
        trail: dict[RequestId, None] = {}
        at: RequestId | None = start
        while at is not None and at in parents and at not in sound:
            if at in trail:
                raise InputError(f"{reader.where(lines[at])}: parent_id: a cycle; expected parents to come first")
            trail[at] = None
            at = parents[at]
        sound.update(trail)
    unknown = [record for record in records if record.parent_id is not None and record.parent_id not in lines]
    if unknown:
        where = reader.where(lines[unknown[0].request_id])
        print(
            f"warning: {where}: parent_id: not in the trace, as of {len(unknown)} requests; each is sent as a "
            "session's first",
            file=sys.stderr,
        )
