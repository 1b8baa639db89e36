"""``tracefile convert --scale``: more, or less, of the same traffic.

The trace is copied: each session of a copy keeps its turns, lengths and gaps, under new ids. All hashes of a copy are
new, so that growth is new prefixes: a cache that grows alike hits alike. Of the last copy only some sessions are
drawn where the scale is no whole number.

Sessions start where the trace's did, window by window: every window's starts are as many times more, their gaps the
window's own, in runs, as many times shorter. So the rate's curve is scaled and bursts stay bursts.
"""

import copy
import hashlib
import heapq
import math
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np

from tracefile.hashing.splitmix64 import MASK64, mix64, mix64_array
from tracefile.records.arrays import FloatArray
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, HashInfo, Meta, Record, RequestId, SessionId, Workload

WINDOW = 64
"""Sessions whose copies mix: enough that copies of one do not come one after the other, few against a trace."""
MOST_MIXED = 1 << 18
"""Copies drawn at once, but for one session's, which are all drawn."""
MOST_TIMES = 1_000_000
KEPT = (
    *("request_id", "session_id", "session_source", "parent_id", "turn", "think_ms", "status"),
    *("endpoint", "model", "stream", "max_tokens", "priority", "lora", "tools", "n"),
    *("prompt_tokens", "output_tokens", "tokens_source", "hashable_blocks", "hash_source", "output_hash_source"),
)
"""What was asked. What an engine made of it (times, cached tokens) belongs to its load, unknown fields to their
writer."""
KEPT_OF_FAILED = ("http_status", "error", "e2e_ms")
"""A client that gave up decides itself how long it waits."""


class Due(NamedTuple):
    """Request of a scaled trace."""

    time_ms: float
    session: int
    turn: int
    """Place in the session, from 0."""
    copy: int


class Source:
    """The trace to scale, in memory: its requests by arrival, as templates, and its sessions."""

    def __init__(self, records: Iterable[Record], path: str) -> None:
        ordered = sorted(records, key=lambda record: _arrival_ms(record, path))
        if not ordered:
            raise InputError(f"{path}: no records; expected a trace to scale")
        by_id = {record.request_id: record for record in ordered}
        self.arrivals_ms = [_arrival_ms(record, path) for record in ordered]
        self.templates = [_template(record, by_id.get(record.parent_id or RequestId(""))) for record in ordered]
        self.chains = [np.array([number % 2**64 for number in record.chain()], np.uint64) for record in ordered]
        sessions: dict[str, list[int]] = {}
        for index, record in enumerate(ordered):
            sessions.setdefault(session_name(record), []).append(index)
        self.sessions = list(sessions.values())
        """Indices of each session's requests; sessions by the arrival of their first."""

    def starts_ms(self) -> FloatArray:
        """Return the arrival of each session's first request; never falls."""
        return np.array([self.arrivals_ms[turns[0]] for turns in self.sessions])


def session_name(record: Record) -> str:
    """Return the name of a record's session, never that of a request without one."""
    return f"request {record.request_id}" if record.session_id is None else f"session {record.session_id}"


def synthetic_meta(meta: Meta, digest: str, times: float, seed: int) -> Meta:
    """Return the header of a scaled trace: no engine served it, and its source is named by its digest."""
    key_id = hashlib.blake2b(f"{digest} {times} {seed}".encode(), digest_size=4).hexdigest()
    return msgspec.structs.replace(
        meta,
        source=None,
        epoch_unix_ns=None,
        engine=None,
        hash=None if meta.hash is None and meta.block_size is None else HashInfo(algorithm="synthetic", key_id=key_id),
        workload=Workload(pattern="synthetic", seed=seed, source_digest=digest, extra={"scale": times}),
        extra={},
    )


def check_scale(times: float) -> None:
    """Raise InputError for a scale that is none."""
    if not 0 < times <= MOST_TIMES:
        raise InputError(f"--scale: {times:g}; expected more than 0 and at most {MOST_TIMES}")


def synthesize(source: Source, times: float, seed: int = 0) -> Iterator[Record]:
    """Yield the scaled trace by arrival. Memory follows the source and the sessions that have turns to come."""
    key = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest())
    for due in due_requests(source, times, seed):
        yield _copied(source, due, mix64((due.copy + key) & MASK64))


def due_requests(source: Source, times: float, seed: int) -> Iterator[Due]:
    """Yield all requests of the scaled trace, by time."""
    waiting: list[Due] = []
    for start in chain(_starts(source, times, seed), [Due(math.inf, -1, 0, 0)]):
        while waiting and waiting[0].time_ms <= start.time_ms:
            due = heapq.heappop(waiting)
            yield due
            _queue_next(source, waiting, due)
        if start.session >= 0:
            yield start
            _queue_next(source, waiting, start)


def _queue_next(source: Source, waiting: list[Due], due: Due) -> None:
    turns = source.sessions[due.session]
    if due.turn + 1 < len(turns):
        gap_ms = source.arrivals_ms[turns[due.turn + 1]] - source.arrivals_ms[turns[due.turn]]
        heapq.heappush(waiting, due._replace(time_ms=due.time_ms + gap_ms, turn=due.turn + 1))


def _starts(source: Source, times: float, seed: int) -> Iterator[Due]:
    """Yield the start of each session's copies, in order."""
    random = np.random.default_rng(seed)
    starts_ms = source.starts_ms()
    # A fraction is the probability of a further copy.
    copies = math.floor(times) + (random.random(len(starts_ms)) < times - math.floor(times))
    size = max(1, math.ceil(min(WINDOW, MOST_MIXED / times) if times > 1 else WINDOW / times))
    mean_gap_ms = (starts_ms[-1] - starts_ms[0]) / max(len(starts_ms) - 1, 1)
    bounds_ms = np.append(starts_ms, starts_ms[-1] + mean_gap_ms)
    for first in range(0, len(starts_ms), size):
        counts = copies[first : first + size]
        sessions = np.repeat(np.arange(first, first + len(counts)), counts)
        numbers = np.arange(len(sessions)) - np.repeat(np.cumsum(counts) - counts, counts)
        order = random.permutation(len(sessions))
        times_ms = _times_like(bounds_ms[first : first + len(counts) + 1], len(order), random)
        for time_ms, session, number in zip(
            times_ms.tolist(), sessions[order].tolist(), numbers[order].tolist(), strict=True
        ):
            yield Due(time_ms, session, 0, number)


def _times_like(bounds_ms: FloatArray, count: int, random: np.random.Generator) -> FloatArray:
    """``count`` times from the first bound to the last, their gaps rounds of the bounds', each begun anywhere."""
    gaps_ms = np.diff(bounds_ms)
    rounds = [np.roll(gaps_ms, random.integers(len(gaps_ms))) for _ in range(-(-count // len(gaps_ms)))]
    new_ms = np.concatenate([[0.0], *rounds])[: count + 1]
    total_ms = new_ms.sum()
    if total_ms > 0:
        new_ms *= (bounds_ms[-1] - bounds_ms[0]) / total_ms
    return np.asarray(bounds_ms[0] + np.cumsum(new_ms)[:count])


def _copied(source: Source, due: Due, key: int) -> Record:
    """Return a request of a copy: new ids and new hashes under the copy's ``key``."""

    def new_name(name: str) -> str:
        return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, key=key.to_bytes(8)).hexdigest()

    index = source.sessions[due.session][due.turn]
    record = copy.copy(source.templates[index])
    hashes: list[BlockHash] = mix64_array(source.chains[index] ^ np.uint64(key)).tolist()
    blocks = len(record.block_hashes or ())
    if record.output_block_hashes is not None:
        record.output_block_hashes = hashes[blocks:]
    if record.block_hashes is not None:
        record.block_hashes = hashes[:blocks]
    record.arrival_ms = due.time_ms
    record.request_id = RequestId(new_name(record.request_id))
    record.session_id = None if record.session_id is None else SessionId(f"s{new_name(record.session_id)}")
    record.parent_id = None if record.parent_id is None else RequestId(new_name(record.parent_id))
    return record


def _template(record: Record, parent: Record | None) -> Record:
    """Return what is kept of a request; ``parent``: null if the trace does not have it."""
    names = KEPT if record.status == "ok" else (*KEPT, *KEPT_OF_FAILED)
    kept = Record(
        block_hashes=record.block_hashes,
        output_block_hashes=record.output_block_hashes,
        **{name: getattr(record, name) for name in names},
    )
    end_ms = None if parent is None else parent.end_ms()
    if kept.think_ms is None and end_ms is not None and record.arrival_ms is not None:
        kept.think_ms = max(record.arrival_ms - end_ms, 0.0)
    if parent is None:
        kept.parent_id = None
    return kept


def _arrival_ms(record: Record, path: str) -> float:
    if record.arrival_ms is None:
        raise InputError(f"{path}: request {record.request_id}: arrival_ms: missing; expected a time")
    return record.arrival_ms
