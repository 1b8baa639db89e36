"""Traces as lines of Mooncake and of Dynamo, whose formats are those of the importers of the same names.

Requests that a format cannot hold are left out and counted by reason.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tracefile.importers.blocktraces import MOONCAKE_BLOCK_SIZE, PARTIAL_BLOCK
from tracefile.importers.dynamo import DYNAMO_SCHEMA, KEPT
from tracefile.records.errors import USAGE_ADVICE, InputError
from tracefile.records.schema import Meta, Record

NO_LENGTHS: Final = "no prompt_tokens or no output_tokens"
NO_ARRIVAL: Final = "no arrival_ms"


@dataclass(slots=True)
class Loss:
    """Account of an export: requests without a line, and requests whose line differs from the record."""

    kept: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Requests without a line, by reason."""
    changed: Counter[str] = field(default_factory=Counter)
    """Requests whose line differs, by difference."""

    def usable(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the records that have lengths and an arrival."""
        for record in records:
            if record.prompt_tokens is None or record.output_tokens is None:
                self.left_out[NO_LENGTHS] += 1
            elif record.arrival_ms is None:
                self.left_out[NO_ARRIVAL] += 1
            else:
                yield record

    def lines(self) -> list[str]:
        """Return the account, a sentence a reason."""
        lines = [f"{count:,} requests left out: {reason}" for reason, count in (+self.left_out).items()]
        return lines + [f"{count:,} requests {change}" for change, count in (+self.changed).items()]

    def check(self, where: str, target: str) -> None:
        """Raise InputError if no request was kept."""
        if not self.kept:
            reasons = ", ".join(self.left_out) or "the trace has no requests"
            advice = USAGE_ADVICE if NO_LENGTHS in self.left_out else "expected other requests"
            raise InputError(f"{where}: nothing to write as {target}: {reasons}; {advice}")


class BlockIds:
    """Small numbers of a trace's blocks in order of first use, one for every started block.

    A block whose hash is unknown gets a number of its own: it is shared with none. So does a partial last block,
    unless the trace was imported with its id.
    """

    def __init__(self, meta: Meta, where: str) -> None:
        if meta.block_size is None:
            raise InputError(f"{where}: meta.block_size: missing; expected a trace with block hashes")
        self.block_size = meta.block_size
        self._numbers: dict[int, int] = {}
        self._partial: dict[int, int] = {}
        self._next = 0

    def of(self, record: Record) -> list[int]:
        """Return the ids of a record's prompt, as many as it has started blocks."""
        full, rest = divmod(record.prompt_tokens or 0, self.block_size)
        known = (record.block_hashes or [])[: record.hashable_blocks]
        ids = [self._numbered(self._numbers, block) for block in known[:full]]
        ids += [self._fresh() for _ in range(full - len(ids))]
        if rest:
            partial = record.extra.get(PARTIAL_BLOCK)
            ids.append(self._numbered(self._partial, partial) if isinstance(partial, int) else self._fresh())
        return ids

    def _numbered(self, numbers: dict[int, int], block: int) -> int:
        number = numbers.get(block)
        if number is None:
            number = numbers[block] = self._fresh()
        return number

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1


def mooncake_lines(records: Iterable[Record], meta: Meta, ids: BlockIds, loss: Loss) -> Iterator[bytes]:
    """Yield lines by arrival, in whole milliseconds as published; memory: the lines."""
    lines: list[tuple[float, int, bytes]] = []
    for record in loss.usable(records):
        if record.block_hashes is None:
            loss.changed["have no hashes: their ids are shared with none"] += 1
        line = {
            "timestamp": round(record.arrival_ms or 0.0),
            "input_length": record.prompt_tokens,
            "output_length": record.output_tokens,
            "hash_ids": ids.of(record),
        }
        lines.append((record.arrival_ms or 0.0, loss.kept, msgspec.json.encode(line)))
        loss.kept += 1
    return (line + b"\n" for _, _, line in sorted(lines))


def dynamo_lines(records: Iterable[Record], meta: Meta, ids: BlockIds, loss: Loss) -> Iterator[bytes]:
    """Yield ``request_end`` events in finish order. Where the first request has a session, every request gets one."""
    with_sessions: bool | None = None
    for record in loss.usable(records):
        if with_sessions is None:
            with_sessions = record.session_id is not None
        if not record.output_tokens or not record.prompt_tokens:
            loss.left_out["no prompt, or no output"] += 1
            continue
        loss.kept += 1
        if record.e2e_ms is None:
            loss.changed["have no end (e2e_ms): they end as they arrive"] += 1
        event: dict[str, Any] = {
            "schema": DYNAMO_SCHEMA,
            "event_type": "request_end",
            "event_time_unix_ms": _unix_ms(meta, record.end_ms() or record.arrival_ms or 0.0),
            "event_source": "dynamo",
        }
        if with_sessions:
            context = {"session_id": record.session_id or record.request_id}
            parent = record.extra.get("parent_session_id")
            event["agent_context"] = context | ({} if parent is None else {"parent_session_id": parent})
        elif record.session_id is not None:
            loss.changed["lose their session: the first request has none"] += 1
        event["request"] = _dynamo_request(record, meta, ids)
        yield msgspec.json.encode(event) + b"\n"


def _dynamo_request(record: Record, meta: Meta, ids: BlockIds) -> dict[str, Any]:
    request = {
        "request_id": record.request_id,
        "model": record.model or meta.model,
        "input_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "request_received_ms": _unix_ms(meta, record.arrival_ms or 0.0),
        "prefill_wait_time_ms": record.queue_ms,
        "ttft_ms": record.ttft_ms,
        "total_time_ms": record.e2e_ms,
        **{name: record.extra.get(name) for name in KEPT},
        "replay": {
            "trace_block_size": ids.block_size,
            "input_length": record.prompt_tokens,
            "input_sequence_hashes": ids.of(record),
        },
        "finish_reason_metadata": None if record.finish_reason is None else {"finish_reason": record.finish_reason},
    }
    return {name: value for name, value in request.items() if value is not None}


def _unix_ms(meta: Meta, at_ms: float) -> int:
    return round((meta.epoch_unix_ns or 0) / 1e6 + at_ms)


@dataclass(frozen=True, slots=True)
class Target:
    """Format that can be written."""

    lines: Callable[[Iterable[Record], Meta, BlockIds, Loss], Iterator[bytes]]
    lost: str
    """Facts of a trace that its lines do not hold."""
    block_size: int | None = None
    """Tokens in a block as the format is usually written; null: its lines say."""


TARGETS: Final = {
    "mooncake": Target(
        mooncake_lines, "sessions, statuses, times of tokens, fractions of a millisecond", MOONCAKE_BLOCK_SIZE
    ),
    "dynamo": Target(dynamo_lines, "statuses, gaps between tokens, fractions of a millisecond"),
}
"""Formats by name."""


def usual_block_size(target: str, meta: Meta) -> int | None:
    """Return the block size to write a trace with, if the format has a usual one and the trace's divides it."""
    usual = TARGETS[target].block_size if target in TARGETS else None
    return usual if usual is not None and meta.block_size is not None and usual % meta.block_size == 0 else None


def export_lines(target: str, records: Iterable[Record], meta: Meta, where: str, loss: Loss) -> Iterator[bytes]:
    """Yield the lines of a trace in a format; raises InputError if it can hold none of the requests."""
    yield from TARGETS[target].lines(records, meta, BlockIds(meta, where), loss)
    loss.check(where, target)
