"""What a trace asks of an engine: its requests, when they come, who waits for whom, and when a client gives up."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sim.workload.chain import Chains
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record
from tracefile.sessions import infer_sessions

Fate = Literal["runs", "as_recorded"]
"""``as_recorded``: it failed before the engine saw it, and is copied; ``runs``: the engine gets it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as the engine's clients send it."""

    record: Record
    fate: Fate
    prompt_tokens: int
    output_tokens: int
    """Tokens it would generate if nobody aborted it."""
    hashes: list[int]
    """Keys of every block that gets full (see ``sim.workload.chain``)."""
    arrival_ms: float
    """As recorded; a child's is overruled by its parent's end."""
    parent: int | None = None
    """Place of the request whose end it waits for. None: it comes at ``arrival_ms``."""
    think_ms: float = 0.0
    """From the parent's end to its arrival."""
    abort_after_ms: float | None = None
    """The client (or a timeout) aborts it so long after its arrival. None: never."""


def plan_arrivals(
    meta: Meta,
    records: Sequence[Record],
    block_size: int,
    *,
    path: str = "trace",
    cold_prompts: bool = False,
    replay_sessions: bool = False,
    needs_hashes: bool = True,
) -> list[Arrival]:
    """Turn a trace into arrivals, in file order. Raises InputError naming the record that cannot be simulated.

    An aborted request asks for all of ``max_tokens`` (where unknown, for as much as it got) and is aborted as long
    after its arrival as it was. One that ended in an error before a response began never reached the engine.
    """
    chains = Chains(meta, block_size)
    if needs_hashes and not cold_prompts and all(record.block_hashes is None for record in records):
        raise InputError(f"{path}: block_hashes: no record has any; expected a trace with them, or --cold-prompts")
    parents = _parents(records) if replay_sessions else {}
    arrivals = []
    for place, record in enumerate(records):
        if record.arrival_ms is None:
            raise InputError(f"{path}: request {record.request_id}: arrival_ms: missing; expected a time")
        output_tokens = _output_tokens(record)
        runs = bool(record.prompt_tokens) and output_tokens > 0 and _reached_engine(record)
        parent = parents.get(place)
        arrivals.append(
            Arrival(
                record=record,
                fate="runs" if runs else "as_recorded",
                prompt_tokens=record.prompt_tokens or 0,
                output_tokens=output_tokens,
                hashes=_keys(chains, record, output_tokens, cold_prompts) if runs else [],
                arrival_ms=record.arrival_ms,
                parent=parent,
                think_ms=0.0 if parent is None else _think_ms(record, records[parent]),
                abort_after_ms=None if record.status == "ok" else record.e2e_ms,
            )
        )
    return arrivals


def linked_records(meta: Meta, records: list[Record], path: Path) -> list[Record]:
    """Return ``records`` with their sessions: as recorded, else inferred from block hashes."""
    if any(record.parent_id is not None for record in records):
        return records
    if meta.block_size is None or all(record.block_hashes is None for record in records):
        raise InputError(f"{path}: --replay-sessions: no sessions and no block hashes to infer them from")
    inference = infer_sessions(records, meta.block_size)
    print(f"{path}: no sessions recorded; inferred from block hashes", file=sys.stderr)
    return list(inference.records)


def _keys(chains: Chains, record: Record, output_tokens: int, cold: bool) -> list[int]:
    full = ((record.prompt_tokens or 0) + output_tokens - 1) // chains.block_size
    known = [] if cold else chains.whole(record)
    return known[:full] + chains.private(full - len(known))


def _output_tokens(record: Record) -> int:
    seen = record.output_tokens or (len(record.itl_ms) + 1 if record.ttft_ms is not None else 0)
    if record.status == "ok":
        return seen or record.max_tokens or 0
    return max(record.max_tokens or 0, seen, 1)


def _reached_engine(record: Record) -> bool:
    if record.status == "ok":
        return True
    return record.e2e_ms is not None and (record.status != "error" or record.http_status == 200)


def _parents(records: Sequence[Record]) -> dict[int, int]:
    """Place of each child's parent. One that came before its parent's end did not wait for it and is a root."""
    places = {record.request_id: place for place, record in enumerate(records)}
    parents = {}
    for place, record in enumerate(records):
        parent = None if record.parent_id is None else places.get(record.parent_id)
        if parent is not None and parent != place and _think_ms(record, records[parent]) >= 0.0:
            parents[place] = parent
    return parents


def _think_ms(record: Record, parent: Record) -> float:
    if record.think_ms is not None:
        return record.think_ms
    end_ms = parent.end_ms()
    return -1.0 if end_ms is None or record.arrival_ms is None else record.arrival_ms - end_ms
