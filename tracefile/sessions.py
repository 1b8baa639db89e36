"""Sessions: the parent of each request, by explicit session ids first, else by its prompt.

The rules, for a request R that arrived at t. A request's *chain* is its prompt's full blocks and, where the output's
ids are known, its output's.

1. R names its session: its parent is the request of that session, likewise named, that ended last at or before t.
2. Else the candidates are the requests that ended at or before t, gave at least one token, and whose complete prompt is
   a proper prefix of R's prompt. The parent is the one whose chain R repeats furthest: into its output as far as that
   came back unaltered, else to the end of its prompt. Of several, the one that ended last, and R is counted as
   *ambiguous*. Requests that overlap R are its branches, never its parents.
3. Where only blocks are known, a prompt that ends on block E may be one that others share for reasons of their own (a
   stand-alone request that holds just the system prompt); it is then no parent, unless R repeats its output. E is such
   a shared prefix if
   (a) a prompt goes on past E that arrived before the first of those that end there had ended: it continues none; or
   (b) two prompts go on past E differently in the very next block. Continuations of one request agree on its output.
   Where the output is too short to fill that block, (b) turns down true branches: no block hash can tell the two apart.
4. No parent: R begins a session of its own, named after it, as turn 1. Without hashes or times nothing is said.

Where the token ids of a chat's prompt are given (``prompt_ids``), rule 2 compares tokens in place of blocks, and rule 3
is not needed: a chat's prompt ends with the template's tokens that begin the answer, which no other conversation has.
Of these tokens, as many as R ends with too may have changed but for the first (templates of thinking models begin an
answer with ``<think>`` and remove it from later prompts).

By finish order every candidate of R is known when R is given. Rule 3 rests on requests that may come later: online a
link holds on the evidence given so far, R's own included; offline (``infer_sessions``) on that of the complete trace.
Think time is the arrival minus the parent's end.

A turn whose prompt lacks the beginning of the one before (compacted, truncated, edited early on) begins a session of
its own: no trace can tell it. So does one that adds less than a block, where only blocks are known.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from tracefile.boundedmap import BoundedMap
from tracefile.hashing.blockhash import TOKEN_BYTES, packed_tokens
from tracefile.hashing.chain import Chain, chain_of, repeated_output
from tracefile.promptends import (
    ENDS_KEPT,
    HEADER_TOKENS,
    HEADERS_COMPARED,
    Candidate,
    Ended,
    Ending,
    Ends,
    Rest,
    backwards,
    by_output,
    common_tokens,
    rank,
    rests_of,
)
from tracefile.records.schema import BlockHash, Continuation, Record, SessionId, SessionSource

NO_CHAINS = "no request was found to continue another, so each is a session of one turn"
"""Words for a trace without a later turn."""
MAX_BLOCKS = 1_000_000
MAX_SESSIONS = 100_000


@dataclass(frozen=True, slots=True)
class SessionInference:
    """A trace with its sessions."""

    records: list[Record]
    """In the order given."""
    inferred: int
    """Links by prompts."""
    ambiguous: int
    """Those of them where several requests could be the parent."""
    shared_prefix: int
    """Requests for which a longer prompt was turned down as a shared prefix (rule 3)."""


PassedEnds = list[tuple[int, Ends]]
"""Ends past which a prompt goes on, by the index of their block."""


class SessionIndex:
    """Links records in finish order at the cost of their chains, in bounded memory: the long unused is forgotten."""

    def __init__(
        self,
        block_size: int,
        *,
        engine_block_size: int | None = None,
        max_blocks: int = MAX_BLOCKS,
        max_sessions: int = MAX_SESSIONS,
    ) -> None:
        self.block_size = block_size
        self.engine_block_size = engine_block_size or block_size
        """Of cached tokens."""
        self.inferred = 0
        self.ambiguous = 0
        self.shared_prefix = 0
        self._blocks: BoundedMap[Hashable, Ends | None] = BoundedMap(max_blocks)
        """Every block past which a prompt goes on (None: nothing ends there); prompts under a block by their model."""
        self._rests: BoundedMap[Rest, Ending] = BoundedMap(max(max_blocks // 8, 2))
        """Two of a request, each of some hundred bytes."""
        self._sessions: BoundedMap[SessionId, Ending] = BoundedMap(max_sessions)

    def link(self, record: Record, prompt_ids: Sequence[int] | None = None) -> Record:
        """Return the record with session, parent, turn and think time as far as known; what was set is kept.

        ``prompt_ids``: of a chat whose prompt ends with the tokens that begin the answer. Null: not known.
        """
        record = _without_inference(record)
        chain = chain_of(record, self.block_size)
        return self._link(record, chain, self._note_evidence(record, chain), prompt_ids)

    def learn(self, record: Record) -> None:
        """Take the record, given in finish order, as evidence of shared prefixes, without linking it."""
        self._note_evidence(record, chain_of(record, self.block_size))

    def link_learnt(self, record: Record) -> Record:
        """``link`` for a record that ``learn`` was given before."""
        record = _without_inference(record)
        chain = chain_of(record, self.block_size)
        passed = [(at, ends) for at, block in enumerate(chain.passed) if (ends := self._blocks.get(block))]
        return self._link(record, chain, passed, None)

    def recall(self, record: Record) -> None:
        """Take a record as it was linked, by an index that is gone; given in finish order."""
        chain = chain_of(record, self.block_size)
        self._note_evidence(record, chain)
        self._remember(record, chain, None)

    def check_integrity(self) -> None:
        self._blocks.check_integrity()
        self._rests.check_integrity()
        self._sessions.check_integrity()
        assert self.ambiguous <= self.inferred
        of_blocks = [
            ending
            for ends in self._blocks.values()
            if ends is not None
            for ending in (ends.outputs, ends.prompts)
            if ending is not None
        ]
        for ending in (*of_blocks, *self._rests.values(), *self._sessions.values()):
            times = [request.end_ms for request in ending.ended]
            assert times == sorted(times)
            assert len(times) <= 2 * ENDS_KEPT

    def _note_evidence(self, record: Record, chain: Chain) -> PassedEnds:
        """Note where the prompt goes on past others' ends, which it returns, and that prompts end on its last block."""
        passed: PassedEnds = []
        if record.arrival_ms is not None:
            passed = [(at, ends) for at, ends in self._blocks.touch_all(chain.passed, None) if ends is not None]
            for at, ends in passed:
                ends.passed = True
                if ends.prompts is not None:
                    ends.prompts.passed(record.arrival_ms, chain.prompt[at + 1] if at + 1 < len(chain.prompt) else None)
        if chain.prompt and self._may_be_parent(record, chain):
            ending = self._prompts_on(chain.prompt[-1])
            ending.first_end_ms = min(ending.first_end_ms, record.end_ms() or 0.0)
        return passed

    def _ends(self, block: Hashable) -> Ends:
        """Return what ends on a block, which is among the youngest from now on."""
        known = self._blocks.get(block)
        ends = Ends(passed=block in self._blocks) if known is None else known
        self._blocks[block] = ends
        return ends

    def _prompts_on(self, block: BlockHash) -> Ending:
        """Return the prompts that end on a block."""
        ends = self._ends(block)
        if ends.prompts is None:
            # A prompt known to have gone on past here finished earlier, so arrived before this end: rule 3 (a).
            ends.prompts = Ending(shared=ends.passed)
        return ends.prompts

    def _may_be_parent(self, record: Record, chain: Chain) -> bool:
        """Return whether a prompt can continue the record, by its chain."""
        known = record.block_hashes is not None and chain.whole
        return known and record.end_ms() is not None and gave_answer(record)

    def _link(self, record: Record, chain: Chain, passed: PassedEnds, prompt_ids: Sequence[int] | None) -> Record:
        tokens = prompt_ids if chain.whole else None
        if record.session_id is not None:
            record = self._link_explicit(record, chain, record.session_id)
        elif record.block_hashes is not None and record.arrival_ms is not None:
            record = self._link_by_prompt(record, chain, passed, tokens, record.arrival_ms)
        self._remember(record, chain, tokens)
        return record

    def _link_explicit(self, record: Record, chain: Chain, session_id: SessionId) -> Record:
        source = record.session_source or "explicit"
        if record.turn is not None or record.parent_id is not None or record.arrival_ms is None:
            return msgspec.structs.replace(record, session_source=source)
        ended = self._sessions.touch(session_id, Ending()).by(record.arrival_ms)
        return self._continued(record, chain, session_id, source, ended[-1] if ended else None)

    def _link_by_prompt(
        self, record: Record, chain: Chain, passed: PassedEnds, tokens: Sequence[int] | None, arrival_ms: float
    ) -> Record:
        root = (record.model, record.lora)
        ends: list[tuple[int, Hashable, Ends]] = [(at, chain.prompt[at], block_ends) for at, block_ends in passed]
        for at, block in ((-1, root), *((at, chain.prompt[at]) for at in range(len(chain.passed), len(chain.prompt)))):
            if (block_ends := self._blocks.get(block)) is not None:
                ends.insert(0 if at < 0 else len(ends), (at, block, block_ends))
        candidate = self._longest(chain, ends, tokens, arrival_ms)
        if candidate is None:
            return self._continued(record, chain, SessionId(f"chain-{record.request_id}"), "inferred", None)
        self.inferred += 1
        self.ambiguous += candidate.ambiguous
        return self._continued(record, chain, candidate.parent.session_id, "inferred", candidate.parent)

    def _longest(
        self,
        chain: Chain,
        ends_on: Sequence[tuple[int, Hashable, Ends]],
        tokens: Sequence[int] | None,
        arrival_ms: float,
    ) -> Candidate | None:
        """Return rule 2's parent, after rule 3; ``ends_on``: what ends on which block of the prompt, in its order."""
        best: Candidate | None = None
        turned_down = 0
        for at, block, ends in reversed(ends_on):
            if best is not None and best.repeated >= (at + 2) * self.block_size + HEADER_TOKENS:
                break  # what ends earlier is shorter
            repeated = (at + 1) * self.block_size
            candidates = list(by_output(ends, at, repeated, arrival_ms))
            if tokens is not None:
                candidates += self._by_tokens(block, ends.rests, tokens, repeated, arrival_ms)
            if ends.prompts is not None and at < len(chain.passed) and (ended := ends.prompts.by(arrival_ms)):
                if ends.prompts.shared:
                    turned_down = turned_down or repeated
                else:
                    candidates.append(Candidate(repeated, ended[-1], len(ended) > 1))
            best = max([best, *candidates] if best else candidates, key=rank, default=None)
        self.shared_prefix += turned_down > (best.repeated if best else 0)
        return best

    def _remember(self, record: Record, chain: Chain, tokens: Sequence[int] | None) -> None:
        end_ms = record.end_ms()
        if end_ms is None:
            return
        request = Ended(
            end_ms,
            record.request_id,
            record.session_id,
            record.turn or 1,
            record.prompt_tokens or len(chain.prompt) * self.block_size,
            record.output_tokens,
            chain.prompt[-1] if chain.prompt and chain.whole else None,
            len(chain.prompt) + len(chain.output),
            chain.output[-1] if chain.output else None,
        )
        if record.session_source == "explicit" and record.session_id is not None:
            self._sessions.touch(record.session_id, Ending()).add(request)
        if not self._may_be_parent(record, chain):
            return
        self._remember_output(request, chain)
        if tokens is not None:
            self._remember_tokens(request, chain, tokens, (record.model, record.lora))
        elif chain.prompt:
            self._prompts_on(chain.prompt[-1]).add(request)

    def _remember_output(self, request: Ended, chain: Chain) -> None:
        """Add the request to those of each block of its output; one object serves a run of blocks."""
        before: Ending | None = None
        ending: Ending | None = None
        for block in chain.output:
            ends = self._ends(block)
            if ending is None or ends.outputs is not before:
                before = ends.outputs
                ending = Ending(ended=[] if before is None else list(before.ended))
                ending.add(request)
            ends.outputs = ending

    def _remember_tokens(self, request: Ended, chain: Chain, tokens: Sequence[int], root: Hashable) -> None:
        """Add the request under the last block before its final HEADER_TOKENS."""
        at = min(max(len(tokens) - HEADER_TOKENS, 0) // self.block_size, len(chain.prompt))
        block = chain.prompt[at - 1] if at else root
        request = request._replace(rest=packed_tokens(tokens[at * self.block_size :]))
        ends, size = self._ends(block), len(request.rest) // TOKEN_BYTES
        if size not in ends.rests:
            ends.rests = (*ends.rests, size)
        for rest in rests_of(block, request.rest):
            self._rests.touch(rest, Ending()).add(request)

    def _continued(
        self,
        record: Record,
        chain: Chain,
        session_id: SessionId | None,
        source: SessionSource,
        parent: Ended | None,
    ) -> Record:
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
            continuation=self._continuation(record, chain, parent),
        )

    def _continuation(self, record: Record, chain: Chain, parent: Ended) -> Continuation | None:
        """Return how the parent's output came back in the record's prompt; null: not known."""
        full = parent.prompt_tokens // self.block_size
        if parent.prompt_end is not None and parent.prompt_end not in chain.prompt[full - 1 : full]:
            return "altered"
        if parent.output_end is not None:
            return "exact" if parent.output_end in chain.prompt[parent.blocks - 1 : parent.blocks] else "altered"
        lengths = (parent.prompt_tokens, parent.output_tokens or 0)
        return repeated_output(lengths, record.cached_tokens, self.block_size, self.engine_block_size).continuation

    def _by_tokens(
        self, block: Hashable, sizes: Collection[int], tokens: Sequence[int], start: int, arrival_ms: float
    ) -> Iterator[Candidate]:
        """Yield the requests whose prompts ``tokens`` goes on from; ``start`` of them are in blocks up to ``block``."""
        if not sizes:
            return
        behind = packed_tokens(tokens[start : start + max(sizes)])
        own_end = backwards(packed_tokens(tokens[-HEADER_TOKENS:]))
        for size in sizes:
            rest = behind[: size * TOKEN_BYTES]
            if start + size >= len(tokens):
                continue
            complete, headless = (self._rests.get(key) for key in rests_of(block, rest))
            if complete is not None and (ended := complete.by(arrival_ms)):
                yield Candidate(start + size, ended[-1], len(ended) > 1)
                continue
            for request in () if headless is None else headless.by(arrival_ms)[-HEADERS_COMPARED:]:
                repeated = common_tokens(request.rest, rest)
                header = common_tokens(backwards(request.rest), own_end)
                if len(request.rest) == len(rest) and repeated > size - header:
                    yield Candidate(start + repeated, request, ambiguous=False)


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
        record, session_id=None, session_source=None, parent_id=None, turn=None, think_ms=None, continuation=None
    )
