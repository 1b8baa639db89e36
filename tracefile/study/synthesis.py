"""A real trace scaled up or down: more of the same traffic, with its tree, popularity, lengths, turns and rhythm.

The scaled trace is made of copies of the trace's conversations. A copy keeps its turns' shapes and offsets; its hashes
are new ones. What only one conversation has is its copy's own; what several have in common is common to the copies of
one family. ``spread`` says how many families there are: at 1 every copy is a family, so growth is new trees, and a
cache that grows alike hits alike; at 0 there is one, so growth is more traffic on the same prefixes.

New conversations start where the old ones did, window by window: every window's starts are as many times more, their
gaps the window's own, in runs, as many times shorter. So the rate's curve is scaled and bursts stay bursts.
"""

import copy
import hashlib
import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import msgspec
import numpy as np

from tracefile.hashing.splitmix64 import mix64_array
from tracefile.records.arrays import FloatArray, IntArray, UInt64Array
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, HashInfo, Meta, Record, RequestId, SessionId, Workload


@dataclass(slots=True)
class Conversations:
    """Conversations of records taken in order of arrival, and the leading blocks that prompts share with others.

    Named sessions are taken as they are. Elsewhere a request continues the conversation whose latest request's chain it
    extends whole, if no other has those blocks: published traces have neither the names nor the ends that
    ``tracefile.sessions`` needs.
    """

    of_record: list[int] = field(default_factory=list)
    """By record: its conversation, numbered as they come."""
    _chains: list[list[int]] = field(default_factory=list)
    _owners: dict[int, int] = field(default_factory=dict)
    """By hash: the conversation that had it first."""
    _shared: set[int] = field(default_factory=set)
    """Hashes that a second one has; with a block, those before it."""
    _ends: list[tuple[int, ...]] = field(default_factory=list)
    """By conversation: lengths of its latest request's chain, without the answer and with it."""
    _named: dict[SessionId, int] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        prompt: list[int] = list(record.block_hashes or ())
        chain = prompt + list(record.output_block_hashes or ())
        known = bisect_left(chain, True, key=lambda block: block not in self._owners)
        here = self._conversation(record, chain, known)
        self._ends[here] = (len(prompt), len(chain))
        self._mark_shared(chain[:known], here)
        for block in chain[known:]:
            self._owners.setdefault(block, here)
        self._chains.append(chain)
        self.of_record.append(here)

    def shared_blocks(self) -> list[int]:
        """Leading blocks that another conversation has too, by record; final after the last record."""
        return [bisect_left(chain, True, key=lambda block: block not in self._shared) for chain in self._chains]

    def _conversation(self, record: Record, chain: Sequence[int], known: int) -> int:
        if record.session_id is not None:
            if record.session_id not in self._named:
                self._named[record.session_id] = self._new()
            return self._named[record.session_id]
        if known and chain[known - 1] not in self._shared:
            owner = self._owners[chain[known - 1]]
            if known in self._ends[owner]:
                return owner
        return self._new()

    def _new(self) -> int:
        self._ends.append(())
        return len(self._ends) - 1

    def _mark_shared(self, blocks: Sequence[int], here: int) -> None:
        is_shared = False
        for block in reversed(blocks):
            if block in self._shared:
                return
            is_shared = is_shared or self._owners[block] != here
            if is_shared:
                self._shared.add(block)


WINDOW = 64
"""Conversations whose copies mix: enough that copies of one do not come one after the other, few against a trace."""
MOST_MIXED = 1 << 18
"""Copies drawn at once, but for one conversation's, which are all drawn."""
BATCH = 4096
KEPT = (
    *("request_id", "session_id", "session_source", "parent_id", "turn", "think_ms", "status"),
    *("endpoint", "model", "stream", "max_tokens", "priority", "lora", "tools", "n"),
    *("prompt_tokens", "output_tokens", "tokens_source", "hashable_blocks", "hash_source", "output_hash_source"),
)
"""What was asked. What an engine made of it (times, cached tokens) is its load's, unknown fields their writer's."""
KEPT_OF_FAILED = ("http_status", "error", "e2e_ms")
"""How long a client that gave up had waited is the client's."""

Due = tuple[float, int, int, int]
"""When, which conversation, which of its turns, which copy."""


MOST_TIMES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Size and spread of a synthetic trace."""

    times: float
    """How many times the source's conversations."""
    spread: float = 1.0
    """How much of the growth is new trees; the rest is more traffic on the same ones."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.times <= MOST_TIMES:
            raise InputError(f"--scale: {self.times:g}; expected more than 0 and at most {MOST_TIMES}")
        if not 0 <= self.spread <= 1:
            raise InputError(f"--spread: {self.spread}; expected 0 to 1")

    @property
    def families(self) -> int:
        return 1 + round(self.spread * (math.ceil(self.times) - 1))


class Source:
    """The trace to scale, in memory: its requests by arrival, as templates, and its conversations."""

    def __init__(self, records: Iterable[Record], path: str) -> None:
        ordered = sorted(records, key=lambda record: _arrival_ms(record, path))
        if not ordered:
            raise InputError(f"{path}: no records; expected a trace to scale")
        conversations = Conversations()
        for record in ordered:
            conversations.add(record)
        places = {record.request_id: place for place, record in enumerate(ordered)}
        self.parents = [None if r.parent_id is None else places.get(r.parent_id) for r in ordered]
        self.templates = [
            _template(record, None if parent is None else ordered[parent])
            for record, parent in zip(ordered, self.parents, strict=True)
        ]
        self.arrivals_ms = [_arrival_ms(record, path) for record in ordered]
        self.of_record = conversations.of_record
        self.turns: list[list[int]] = [[] for _ in range(max(self.of_record) + 1)]
        for place, conversation in enumerate(self.of_record):
            self.turns[conversation].append(place)
        self.chains = [_chain(record) for record in ordered]
        self.prompt_blocks = [None if r.block_hashes is None else len(r.block_hashes) for r in ordered]
        self.has_output = [record.output_block_hashes is not None for record in ordered]
        self.shared = np.array(conversations.shared_blocks(), np.int64)

    def starts_ms(self) -> FloatArray:
        """Arrival of each conversation's first request; never falls."""
        return np.array([self.arrivals_ms[turns[0]] for turns in self.turns])


def synthetic_meta(meta: Meta, digest: str, scale: Scale) -> Meta:
    """The header of a scaled trace: no engine served it, and its source is named."""
    key_id = hashlib.blake2b(f"{digest} {scale}".encode(), digest_size=4).hexdigest()
    return msgspec.structs.replace(
        meta,
        source=None,
        epoch_unix_ns=None,
        engine=None,
        hash=None if meta.hash is None and meta.block_size is None else HashInfo(algorithm="synthetic", key_id=key_id),
        workload=Workload(
            pattern="synthetic",
            seed=scale.seed,
            source_digest=digest,
            extra={"scale": scale.times, "spread": scale.spread},
        ),
        extra={},
    )


def synthesize(source: Source, scale: Scale) -> Iterator[Record]:
    """The scaled trace by arrival. Memory follows the source and the conversations that have turns to come."""
    copies = CopyMaker(source, scale)
    due = due_requests(source, scale)
    while batch := list(islice(due, BATCH)):
        yield from copies.records(batch)


def due_requests(source: Source, scale: Scale) -> Iterator[Due]:
    """Yield all requests of the scaled trace, by time."""
    waiting: list[Due] = []
    for start_ms, conversation, number in chain(new_starts(source, scale), [(math.inf, -1, 0)]):
        while waiting and waiting[0][0] <= start_ms:
            time_ms, other, turn, of_copy = due = heapq.heappop(waiting)
            yield due
            _queue_next(source, waiting, (time_ms, other, turn, of_copy))
        if conversation >= 0:
            first = (start_ms, conversation, 0, number)
            yield first
            _queue_next(source, waiting, first)


def _queue_next(source: Source, waiting: list[Due], due: Due) -> None:
    time_ms, conversation, turn, number = due
    turns = source.turns[conversation]
    if turn + 1 < len(turns):
        gap_ms = source.arrivals_ms[turns[turn + 1]] - source.arrivals_ms[turns[turn]]
        heapq.heappush(waiting, (time_ms + gap_ms, conversation, turn + 1, number))


def new_starts(source: Source, scale: Scale) -> Iterator[tuple[float, int, int]]:
    """Yield the start of each conversation's copies, in order."""
    random = np.random.default_rng([scale.seed, 1])
    starts_ms, copies = source.starts_ms(), _copies(source, scale)
    size = (
        max(1, math.ceil(min(WINDOW, MOST_MIXED / scale.times))) if scale.times > 1 else math.ceil(WINDOW / scale.times)
    )
    mean_gap_ms = (starts_ms[-1] - starts_ms[0]) / max(len(starts_ms) - 1, 1)
    bounds_ms = np.append(starts_ms, starts_ms[-1] + mean_gap_ms)
    for first in range(0, len(starts_ms), size):
        counts = copies[first : first + size]
        conversations = np.repeat(np.arange(first, first + len(counts)), counts)
        numbers = np.arange(len(conversations)) - np.repeat(np.cumsum(counts) - counts, counts)
        order = random.permutation(len(conversations))
        times_ms = _times_like(bounds_ms[first : first + len(counts) + 1], len(order), random)
        yield from zip(times_ms.tolist(), conversations[order].tolist(), numbers[order].tolist(), strict=True)


def _times_like(bounds_ms: FloatArray, count: int, random: np.random.Generator) -> FloatArray:
    """``count`` times from the first bound to the last, their gaps rounds of the bounds', each begun anywhere."""
    gaps_ms = np.diff(bounds_ms)
    rounds = [np.roll(gaps_ms, random.integers(len(gaps_ms))) for _ in range(-(-count // len(gaps_ms)))]
    new_ms = np.concatenate([[0.0], *rounds])[: count + 1]
    total_ms = new_ms.sum()
    if total_ms > 0:
        new_ms *= (bounds_ms[-1] - bounds_ms[0]) / total_ms
    return np.asarray(bounds_ms[0] + np.cumsum(new_ms)[:count])


def _copies(source: Source, scale: Scale) -> IntArray:
    """Draw the number of copies of each conversation; a fraction is a copy's probability."""
    whole = math.floor(scale.times)
    draws = np.random.default_rng([scale.seed, 2]).random(len(source.turns))
    return np.asarray(whole + (draws < scale.times - whole), np.int64)


class CopyMaker:
    """Records of copies: a conversation's requests under new ids and new hashes."""

    def __init__(self, source: Source, scale: Scale) -> None:
        self._source = source
        self._families = scale.families
        seed = hashlib.blake2b(str(scale.seed).encode(), digest_size=8).digest()
        self._key = np.uint64(int.from_bytes(seed))

    def records(self, batch: list[Due]) -> Iterator[Record]:
        source = self._source
        places = [source.turns[conversation][turn] for _, conversation, turn, _ in batch]
        copies = np.array([number for _, _, _, number in batch], np.int64)
        hashes = self._hashes(places, copies)
        ids = self._ids(np.array(places), copies)
        parents = self._ids(np.array([source.parents[place] or 0 for place in places]), copies)
        sessions = self._ids(np.array([conversation for _, conversation, _, _ in batch]), copies)
        end = 0
        for at, (place, (time_ms, *_)) in enumerate(zip(places, batch, strict=True)):
            record = copy.copy(source.templates[place])
            record.request_id = RequestId(f"{ids[at]:016x}")
            record.arrival_ms = time_ms
            if record.session_id is not None:
                record.session_id = SessionId(f"s{sessions[at]:016x}")
            record.parent_id = None if source.parents[place] is None else RequestId(f"{parents[at]:016x}")
            start, end = end, end + len(source.chains[place])
            if (blocks := source.prompt_blocks[place]) is not None:
                record.block_hashes = hashes[start : start + blocks]
                if source.has_output[place]:
                    record.output_block_hashes = hashes[start + blocks : end]
            yield record

    def _hashes(self, places: list[int], copies: IntArray) -> list[BlockHash]:
        """All the places' chains: leading shared blocks are their family's, the rest their copy's own."""
        chains = [self._source.chains[place] for place in places]
        lengths = np.array([len(chain) for chain in chains])
        starts = np.cumsum(lengths) - lengths
        at = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
        shared = at < np.repeat(self._source.shared[places], lengths)
        families = 2 * (copies % self._families)
        key = np.where(shared, np.repeat(families, lengths), np.repeat(2 * copies + 1, lengths))
        found: list[BlockHash] = mix64_array(
            np.concatenate(chains) ^ mix64_array(key.astype(np.uint64) + self._key)
        ).tolist()
        return found

    def _ids(self, numbers: IntArray, copies: IntArray) -> list[int]:
        """A number of a copy under the seed's key: different for different ones."""
        both = (copies.astype(np.uint64) << np.uint64(32)) | numbers.astype(np.uint64)
        found: list[int] = mix64_array(both ^ self._key).tolist()
        return found


def _template(record: Record, parent: Record | None) -> Record:
    names = KEPT if record.status == "ok" else (*KEPT, *KEPT_OF_FAILED)
    kept = Record(**{name: getattr(record, name) for name in names})
    end_ms = None if parent is None else parent.end_ms()
    if kept.think_ms is None and end_ms is not None and record.arrival_ms is not None:
        kept.think_ms = max(record.arrival_ms - end_ms, 0.0)
    return kept


def _chain(record: Record) -> UInt64Array:
    return np.array([number % 2**64 for number in record.chain()], np.uint64)


def _arrival_ms(record: Record, path: str) -> float:
    if record.arrival_ms is None:
        raise InputError(f"{path}: request {record.request_id}: arrival_ms: missing; expected a time")
    return record.arrival_ms
