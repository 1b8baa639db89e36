"""Sessions: the parent of each request, by explicit session ids first, else by the hash chains.

The rules, for a request R that arrived at t. A request's *chain* is its prompt's full blocks and, where the answer's
ids are known, its output's; it *ends* on the chain's last block.

1. R names its session: its parent is the request of that session, likewise named, that ended last at or before t.
2. Else the candidates are the requests that ended at or before t, gave at least one token, and whose whole chain of
   one block or more is a proper prefix of R's prompt (fewer full blocks than R's). The parent is the one with the
   longest chain; of several with the same chain, the one that ended last, and R is counted as *ambiguous*.
   Requests that overlap R are its branches, never its parents.
3. A candidate that ends on a prefix which others share for reasons of their own is no parent (a stand-alone request
   that holds just the system prompt), and the next longest chain is tried. The block E on which requests end is such
   a shared prefix if none of them ends there within its own answer (then only who saw the answer can go on from it),
   and either
   (a) a request goes on past E that arrived before the first of them had ended: it can have continued none; or
   (b) two requests go on past E differently in the very next block. Continuations of one request agree on its answer.
   Where the answer is too short to fill that block, (b) turns down true branches: no trace can tell the two apart.
4. No parent: R begins a session of its own, named after it, as turn 1. Without hashes or times nothing is said.

Known online and offline: by finish order every candidate of R is known when R is given, so rules 1 and 2 give the same
links either way. Rule 3 rests on requests that may come later: online a link holds on the evidence given so far, R's
own included; offline (``infer_sessions``) on the whole trace's. So the first continuation of a prefix not yet known
to be shared is linked online and may not be offline. Think time is the arrival minus the parent's end.

A turn that adds less than a block to the one before, or whose answer comes back altered (reasoning removed, other
tokens for the same text), cannot be told and begins a session of its own.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from tracefile.boundedmap import BoundedMap
from tracefile.records.schema import BlockHash, Record, RequestId, SessionId, SessionSource

NO_CHAINS = "no request was found to continue another, so each is a session of one turn"
"""Words for a trace without a later turn."""
MAX_BLOCKS = 1_000_000
MAX_SESSIONS = 100_000
ENDS_KEPT = 1024
"""Requests remembered that ended on one block or in one session; the earliest are forgotten first."""


class Ended(NamedTuple):
    """A request that may be continued."""

    end_ms: float
    request_id: RequestId
    session_id: SessionId | None
    turn: int


@dataclass(slots=True)
class Ending:
    """The requests that end on one block (or in one session), by end, and what is known of who goes on from there."""

    shared: bool = False
    """Rule 3's (a) or (b) was seen."""
    answered: bool = False
    """One of them ends within its own answer: rule 3 does not apply."""
    first_end_ms: float = float("inf")
    continuation: BlockHash | None = None
    """The next block of those that went on."""
    ended: list[Ended] = field(default_factory=list)

    def add(self, request: Ended) -> None:
        """Remember one more; given in finish order, that is at the end."""
        if not self.ended or self.ended[-1].end_ms <= request.end_ms:
            self.ended.append(request)
        else:
            self.ended.insert(bisect_right(self.ended, request.end_ms, key=_end_ms), request)
        if len(self.ended) > 2 * ENDS_KEPT:
            del self.ended[:ENDS_KEPT]

    def count_by(self, at_ms: float) -> int:
        """Return the number of requests that had ended at ``at_ms``: the first ones of ``ended``."""
        if self.ended and self.ended[-1].end_ms <= at_ms:
            return len(self.ended)
        return bisect_right(self.ended, at_ms, key=_end_ms)

    def passed(self, arrival_ms: float, following: BlockHash | None) -> None:
        """Take note of a request that goes on past here with block ``following`` (None: with what, is not known)."""
        if arrival_ms < self.first_end_ms:
            self.shared = True
        elif following is not None:
            self.continuation = self.continuation or following
            self.shared = self.shared or following != self.continuation


def _end_ms(request: Ended) -> float:
    return request.end_ms


Endings = Sequence[tuple[int, Ending]]
"""Those on a request's own chain, by the position of their block in it."""


class Chain(NamedTuple):
    """Hash chain of a record."""

    prompt: Sequence[BlockHash]
    """The prompt's blocks, as far as their hashes are true."""
    blocks: Sequence[BlockHash]
    """Those and the output's."""
    whole: bool
    """No full block of the prompt is missing, so the chain's end is the request's."""

    @property
    def answered(self) -> bool:
        """Return whether the chain ends on a block that holds some of the answer."""
        return len(self.blocks) > len(self.prompt)


def chain_of(record: Record, block_size: int) -> Chain:
    """The record's chain; empty where it has no hashes."""
    hashes = record.block_hashes or []
    prompt = hashes if record.hashable_blocks is None else hashes[: record.hashable_blocks]
    full = len(hashes) if record.prompt_tokens is None else record.prompt_tokens // block_size
    whole = len(prompt) >= full
    output = record.output_block_hashes if whole and record.output_block_hashes else []
    return Chain(prompt, [*prompt, *output] if output else prompt, whole)


@dataclass(frozen=True, slots=True)
class SessionInference:
    """A trace with its sessions told."""

    records: list[Record]
    """In the order given."""
    inferred: int
    """Links that the hash chains told."""
    ambiguous: int
    """Those of them where several requests had the parent's chain."""
    shared_prefix: int
    """Requests for which a longer chain was turned down as a shared prefix (rule 3)."""


class SessionIndex:
    """Links records in finish order at the cost of their chains, in bounded memory: the long unused is forgotten."""

    def __init__(self, block_size: int, *, max_blocks: int = MAX_BLOCKS, max_sessions: int = MAX_SESSIONS) -> None:
        self.block_size = block_size
        self.inferred = 0
        self.ambiguous = 0
        self.shared_prefix = 0
        self._blocks: BoundedMap[BlockHash, Ending | None] = BoundedMap(max_blocks)
        """Every block seen with one after it (None), or with requests that end on it."""
        self._sessions: BoundedMap[SessionId, Ending] = BoundedMap(max_sessions)

    def link(self, record: Record) -> Record:
        """Return the record with session, parent, turn and think time as far as known; what was set is kept."""
        told = _without_inference(record)
        chain = chain_of(told, self.block_size)
        return self._place(told, chain, self._note_passage(told, chain))

    def learn(self, record: Record) -> None:
        """Take the record, given in finish order, as evidence of shared prefixes, without linking it."""
        chain = chain_of(record, self.block_size)
        self._note_passage(record, chain)
        self._note_ending(record, chain)

    def link_learnt(self, record: Record) -> Record:
        """``link`` for a record that ``learn`` was given before."""
        told = _without_inference(record)
        chain = chain_of(told, self.block_size)
        found = [(at, ending) for at, block in enumerate(chain.prompt) if (ending := self._blocks.get(block))]
        return self._place(told, chain, found)

    def recall(self, record: Record) -> None:
        """Take a record as it was linked, by an index that is gone; given in finish order."""
        chain = chain_of(record, self.block_size)
        self._note_passage(record, chain)
        self._remember(record, chain)

    def check_integrity(self) -> None:
        self._blocks.check_integrity()
        self._sessions.check_integrity()
        assert self.ambiguous <= self.inferred
        for ending in (*self._blocks.values(), *self._sessions.values()):
            ends = [request.end_ms for request in ending.ended] if ending else []
            assert ends == sorted(ends)
            assert len(ends) <= 2 * ENDS_KEPT

    def _place(self, record: Record, chain: Chain, endings: Endings) -> Record:
        if record.session_id is not None:
            record = self._link_explicit(record, record.session_id)
        elif record.block_hashes is not None and record.arrival_ms is not None:
            record = self._link_by_chain(record, chain, endings, record.arrival_ms)
        self._remember(record, chain)
        return record

    def _note_passage(self, record: Record, chain: Chain) -> Endings:
        """Take note of where the record goes on past others' ends, which it gives."""
        blocks = chain.blocks
        if record.arrival_ms is None or not blocks:
            return []
        endings = self._blocks.touch_all(blocks[:-1] if chain.whole else blocks, None)
        found = [(at, ending) for at, ending in endings if ending is not None]
        for at, ending in found:
            ending.passed(record.arrival_ms, blocks[at + 1] if at + 1 < len(blocks) else None)
        return found

    def _note_ending(self, record: Record, chain: Chain) -> Ending | None:
        """Take note of where the record ends; None if it cannot be anyone's parent by its chain."""
        end_ms = record.end_ms()
        if end_ms is None or not chain.whole or not chain.blocks or not gave_answer(record):
            return None
        last = chain.blocks[-1]
        ending = self._blocks.get(last)
        if ending is None:
            # A request known to have gone on past here finished earlier, so arrived before this end: rule 3 (a).
            ending = Ending(shared=last in self._blocks)
        self._blocks[last] = ending
        ending.first_end_ms = min(ending.first_end_ms, end_ms)
        ending.answered = ending.answered or chain.answered
        return ending

    def _link_explicit(self, record: Record, session_id: SessionId) -> Record:
        source = record.session_source or "explicit"
        if record.turn is not None or record.parent_id is not None or record.arrival_ms is None:
            return msgspec.structs.replace(record, session_source=source)
        ending = self._sessions.touch(session_id, Ending())
        count = ending.count_by(record.arrival_ms)
        return _continued(record, session_id, source, ending.ended[count - 1] if count else None)

    def _link_by_chain(self, record: Record, chain: Chain, endings: Endings, arrival_ms: float) -> Record:
        ending = self._longest_ending(chain, endings, arrival_ms)
        if ending is None:
            return _continued(record, SessionId(f"chain-{record.request_id}"), "inferred", None)
        count = ending.count_by(arrival_ms)
        parent = ending.ended[count - 1]
        self.inferred += 1
        self.ambiguous += count > 1
        return _continued(record, parent.session_id, "inferred", parent)

    def _longest_ending(self, chain: Chain, endings: Endings, arrival_ms: float) -> Ending | None:
        """Return the block on which rule 2's candidates with the longest chain end, after rule 3."""
        if not endings:
            return None
        longest = len(chain.prompt) - (1 if chain.whole else 0)
        turned_down = 0
        found = None
        for at, ending in reversed(endings):
            if at >= longest or not ending.count_by(arrival_ms):
                continue
            if ending.answered or not ending.shared:
                found = ending
                break
            turned_down = 1
        self.shared_prefix += turned_down
        return found

    def _remember(self, record: Record, chain: Chain) -> None:
        end_ms = record.end_ms()
        if end_ms is None:
            return
        request = Ended(end_ms, record.request_id, record.session_id, record.turn or 1)
        if record.session_source == "explicit" and record.session_id is not None:
            self._sessions.touch(record.session_id, Ending()).add(request)
        ending = self._note_ending(record, chain)
        if ending is not None:
            ending.add(request)


def infer_sessions(records: Iterable[Record], block_size: int) -> SessionInference:
    """Link a whole trace, in any order, on the whole trace's evidence; holds it in memory."""
    given = list(records)
    order = sorted(range(len(given)), key=lambda i: _finish_order(given[i]))
    unbounded = 2**62
    index = SessionIndex(block_size, max_blocks=unbounded, max_sessions=unbounded)
    for i in order:
        index.learn(given[i])
    linked = list(given)
    for i in order:
        linked[i] = index.link_learnt(given[i])
    return SessionInference(linked, index.inferred, index.ambiguous, index.shared_prefix)


def gave_answer(record: Record) -> bool:
    """Return whether there is an answer to continue: all but failures without a token."""
    return record.status == "ok" or bool(record.output_tokens) or record.ttft_ms is not None


def _finish_order(record: Record) -> tuple[float, float]:
    arrival_ms = record.arrival_ms or 0.0
    end_ms = record.end_ms()
    return (arrival_ms if end_ms is None else end_ms, arrival_ms)


def _without_inference(record: Record) -> Record:
    if record.session_source != "inferred":
        return record
    return msgspec.structs.replace(
        record, session_id=None, session_source=None, parent_id=None, turn=None, think_ms=None
    )


def _continued(record: Record, session_id: SessionId | None, source: SessionSource, parent: Ended | None) -> Record:
    """The record as the turn after ``parent``; None: as the first of its session."""
    if parent is None or record.arrival_ms is None:
        return msgspec.structs.replace(record, session_id=session_id, session_source=source, turn=1)
    return msgspec.structs.replace(
        record,
        session_id=session_id,
        session_source=source,
        parent_id=parent.request_id,
        turn=parent.turn + 1,
        think_ms=record.arrival_ms - parent.end_ms,
    )
