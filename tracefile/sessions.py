"""Sessions: the parent of each request, from explicit session ids, else from its prompt's prefix.

The rules, for a request R that arrived at t. The *chain* of a request is the full blocks of its prompt and, if the
output token ids are known, of its output.

1. R has an explicit session id: its parent is the request with that id that ended last at or before t.
2. Else a candidate is a request that ended at or before t, generated at least one token, and whose complete prompt is
   a proper prefix of R's prompt. The parent is the candidate whose chain R repeats furthest: into its output as far as
   the output came back unchanged, else to the end of its prompt. Of several, the parent is the candidate that ended
   last, and R counts as *ambiguous*. A request that overlaps R in time is never its parent.
3. If only block hashes are known, a prompt that ends on block E may be a shared prefix (a single request with just the
   system prompt). It is then no parent, unless R repeats its output. Block E ends a shared prefix if
   (a) a prompt continues past E that arrived before the first request that ends on E had ended; or
   (b) two prompts continue past E with different next blocks. Continuations of one request agree on its output.
   If the output is too short to fill the next block, (b) also rejects true branches: block hashes cannot separate them.
4. Without a parent, R starts a session named after it, as turn 1. Without hashes or times, no session is inferred.

If the token ids of a chat prompt are known (``prompt_ids``), rule 2 compares tokens instead of blocks, and rule 3 does
not apply: a chat prompt ends with the template's generation header, which no other conversation shares. As many header
tokens as R's prompt also ends with may have changed, except the first: templates of thinking models begin an answer
with ``<think>`` and remove it from later prompts.

In finish order, every candidate of R comes before R. Rule 3 depends on requests that may come later: online, a link
uses the records so far, R included; offline (``infer_sessions``), the complete trace. Think time is the arrival minus
the parent's end.

A turn whose prompt lacks the beginning of the previous turn (compacted, truncated, edited) starts a new session: a
trace cannot show the connection. So does a turn that adds less than a block, if only block hashes are known.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from tracefile.boundedmap import BoundedMap
from tracefile.hashing.blockhash import TOKEN_BYTES, packed_tokens
from tracefile.hashing.chain import Chain, chain_of, repeated_output
from tracefile.promptends import (
    HEADER_TOKENS,
    HEADERS_COMPARED,
    MAX_ENDS,
    BlockEnds,
    Candidate,
    FinishedRequest,
    PromptTail,
    RequestsByEnd,
    backwards,
    by_output,
    common_tokens,
    rank,
    tail_keys,
)
from tracefile.records.schema import BlockHash, Continuation, Record, SessionId, SessionSource

NO_CHAINS = "no request continues another: every request is a session of one turn"
"""Message for a trace without later turns."""
MAX_BLOCKS = 1_000_000
MAX_SESSIONS = 100_000


@dataclass(frozen=True, slots=True)
class SessionInference:
    """A trace with its sessions."""

    records: list[Record]
    """In the input order."""
    inferred: int
    """Requests whose parent was inferred from the prompt."""
    ambiguous: int
    """Inferred requests with several possible parents."""
    shared_prefix: int
    """Requests for which a longer candidate was rejected as a shared prefix (rule 3)."""


ContinuedEnds = list[tuple[int, BlockEnds]]
"""Ends past which a prompt continues, by the index of their block."""


class SessionIndex:
    """Links records in finish order, in bounded memory: the least recently used entries are evicted."""

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
        """Block size of cached tokens."""
        self.inferred = 0
        self.ambiguous = 0
        self.shared_prefix = 0
        self._blocks: BoundedMap[Hashable, BlockEnds | None] = BoundedMap(max_blocks)
        """Blocks past which a prompt continues (None: no request ends there); prompts shorter than a block by model."""
        self._tails: BoundedMap[PromptTail, RequestsByEnd] = BoundedMap(max(max_blocks // 8, 2))
        """Two entries per request, each of about a hundred bytes."""
        self._sessions: BoundedMap[SessionId, RequestsByEnd] = BoundedMap(max_sessions)

    def link(self, record: Record, prompt_ids: Sequence[int] | None = None) -> Record:
        """Return the record with session, parent, turn and think time; explicit values are kept.

        ``prompt_ids``: token ids of a chat prompt that ends with the generation header. None: unknown.
        """
        record = _without_inference(record)
        chain = chain_of(record, self.block_size)
        return self._link(record, chain, self._add_evidence(record, chain), prompt_ids)

    def learn(self, record: Record) -> None:
        """Use a record, in finish order, as evidence of shared prefixes, without linking it."""
        self._add_evidence(record, chain_of(record, self.block_size))

    def link_learned(self, record: Record) -> Record:
        """``link`` for a record after ``learn``."""
        record = _without_inference(record)
        chain = chain_of(record, self.block_size)
        continued = [(at, ends) for at, block in enumerate(chain.extended) if (ends := self._blocks.get(block))]
        return self._link(record, chain, continued, None)

    def recall(self, record: Record) -> None:
        """Add a record that another index linked before a restart, in finish order."""
        chain = chain_of(record, self.block_size)
        self._add_evidence(record, chain)
        self._store(record, chain, None)

    def check_integrity(self) -> None:
        self._blocks.check_integrity()
        self._tails.check_integrity()
        self._sessions.check_integrity()
        assert self.ambiguous <= self.inferred
        of_blocks = [
            ending
            for ends in self._blocks.values()
            if ends is not None
            for ending in (ends.outputs, ends.prompts)
            if ending is not None
        ]
        for ending in (*of_blocks, *self._tails.values(), *self._sessions.values()):
            times = [request.end_ms for request in ending.ended]
            assert times == sorted(times)
            assert len(times) <= 2 * MAX_ENDS

    def _add_evidence(self, record: Record, chain: Chain) -> ContinuedEnds:
        """Add the prompt as evidence for rule 3; return the ends past which it continues."""
        continued: ContinuedEnds = []
        if record.arrival_ms is not None:
            continued = [(at, ends) for at, ends in self._blocks.touch_all(chain.extended, None) if ends is not None]
            for at, ends in continued:
                ends.continued = True
                if ends.prompts is not None:
                    ends.prompts.continue_with(
                        record.arrival_ms, chain.prompt[at + 1] if at + 1 < len(chain.prompt) else None
                    )
        if chain.prompt and self._may_be_parent(record, chain):
            ending = self._prompts_on(chain.prompt[-1])
            ending.first_end_ms = min(ending.first_end_ms, record.end_ms() or 0.0)
        return continued

    def _ends(self, block: Hashable) -> BlockEnds:
        """Return the ends on a block, and make the block the most recent."""
        stored = self._blocks.get(block)
        ends = BlockEnds(continued=block in self._blocks) if stored is None else stored
        self._blocks[block] = ends
        return ends

    def _prompts_on(self, block: BlockHash) -> RequestsByEnd:
        """Return the requests whose prompts end on a block."""
        ends = self._ends(block)
        if ends.prompts is None:
            # A prompt that continues past the block finished earlier, so it arrived before this end: rule 3 (a).
            ends.prompts = RequestsByEnd(shared=ends.continued)
        return ends.prompts

    def _may_be_parent(self, record: Record, chain: Chain) -> bool:
        """Return whether a later prompt can continue the record."""
        hashed = record.block_hashes is not None and chain.complete
        return hashed and record.end_ms() is not None and has_output(record)

    def _link(self, record: Record, chain: Chain, continued: ContinuedEnds, prompt_ids: Sequence[int] | None) -> Record:
        tokens = prompt_ids if chain.complete else None
        if record.session_id is not None:
            record = self._link_explicit(record, chain, record.session_id)
        elif record.block_hashes is not None and record.arrival_ms is not None:
            record = self._link_by_prompt(record, chain, continued, tokens, record.arrival_ms)
        self._store(record, chain, tokens)
        return record

    def _link_explicit(self, record: Record, chain: Chain, session_id: SessionId) -> Record:
        source = record.session_source or "explicit"
        if record.turn is not None or record.parent_id is not None or record.arrival_ms is None:
            return msgspec.structs.replace(record, session_source=source)
        ended = self._sessions.touch(session_id, RequestsByEnd()).by(record.arrival_ms)
        return self._continued(record, chain, session_id, source, ended[-1] if ended else None)

    def _link_by_prompt(
        self, record: Record, chain: Chain, continued: ContinuedEnds, tokens: Sequence[int] | None, arrival_ms: float
    ) -> Record:
        root = (record.model, record.lora)
        ends: list[tuple[int, Hashable, BlockEnds]] = [
            (at, chain.prompt[at], block_ends) for at, block_ends in continued
        ]
        for at, block in (
            (-1, root),
            *((at, chain.prompt[at]) for at in range(len(chain.extended), len(chain.prompt))),
        ):
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
        ends_on: Sequence[tuple[int, Hashable, BlockEnds]],
        tokens: Sequence[int] | None,
        arrival_ms: float,
    ) -> Candidate | None:
        """Return the parent by rules 2 and 3; ``ends_on``: (index, block, ends) along the prompt."""
        best: Candidate | None = None
        rejected = 0
        for at, block, ends in reversed(ends_on):
            if best is not None and best.repeated >= (at + 2) * self.block_size + HEADER_TOKENS:
                break  # earlier ends are shorter
            repeated = (at + 1) * self.block_size
            candidates = list(by_output(ends, at, repeated, arrival_ms))
            if tokens is not None:
                candidates += self._by_tokens(block, ends.tail_sizes, tokens, repeated, arrival_ms)
            if ends.prompts is not None and at < len(chain.extended) and (ended := ends.prompts.by(arrival_ms)):
                if ends.prompts.shared:
                    rejected = rejected or repeated
                else:
                    candidates.append(Candidate(repeated, ended[-1], len(ended) > 1))
            best = max([best, *candidates] if best else candidates, key=rank, default=None)
        self.shared_prefix += rejected > (best.repeated if best else 0)
        return best

    def _store(self, record: Record, chain: Chain, tokens: Sequence[int] | None) -> None:
        end_ms = record.end_ms()
        if end_ms is None:
            return
        request = FinishedRequest(
            end_ms,
            record.request_id,
            record.session_id,
            record.turn or 1,
            record.prompt_tokens or len(chain.prompt) * self.block_size,
            record.output_tokens,
            chain.prompt[-1] if chain.prompt and chain.complete else None,
            len(chain.prompt) + len(chain.output),
            chain.output[-1] if chain.output else None,
        )
        if record.session_source == "explicit" and record.session_id is not None:
            self._sessions.touch(record.session_id, RequestsByEnd()).add(request)
        if not self._may_be_parent(record, chain):
            return
        self._store_output(request, chain)
        if tokens is not None:
            self._store_tokens(request, chain, tokens, (record.model, record.lora))
        elif chain.prompt:
            self._prompts_on(chain.prompt[-1]).add(request)

    def _store_output(self, request: FinishedRequest, chain: Chain) -> None:
        """Add the request to the ends of each output block; consecutive blocks share an object."""
        before: RequestsByEnd | None = None
        ending: RequestsByEnd | None = None
        for block in chain.output:
            ends = self._ends(block)
            if ending is None or ends.outputs is not before:
                before = ends.outputs
                ending = RequestsByEnd(ended=[] if before is None else list(before.ended))
                ending.add(request)
            ends.outputs = ending

    def _store_tokens(self, request: FinishedRequest, chain: Chain, tokens: Sequence[int], root: Hashable) -> None:
        """Add the request to the ends of the last block before its final HEADER_TOKENS."""
        at = min(max(len(tokens) - HEADER_TOKENS, 0) // self.block_size, len(chain.prompt))
        block = chain.prompt[at - 1] if at else root
        request = request._replace(tail=packed_tokens(tokens[at * self.block_size :]))
        ends, size = self._ends(block), len(request.tail) // TOKEN_BYTES
        if size not in ends.tail_sizes:
            ends.tail_sizes = (*ends.tail_sizes, size)
        for key in tail_keys(block, request.tail):
            self._tails.touch(key, RequestsByEnd()).add(request)

    def _continued(
        self,
        record: Record,
        chain: Chain,
        session_id: SessionId | None,
        source: SessionSource,
        parent: FinishedRequest | None,
    ) -> Record:
        """Return the record as the turn after ``parent``; None: as the first turn of a session."""
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

    def _continuation(self, record: Record, chain: Chain, parent: FinishedRequest) -> Continuation | None:
        """Return how the prompt repeats the parent's output; None: unknown."""
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
        """Yield the requests whose prompts ``tokens`` continues; the first ``start`` tokens end with ``block``."""
        if not sizes:
            return
        following = packed_tokens(tokens[start : start + max(sizes)])
        header_of_prompt = backwards(packed_tokens(tokens[-HEADER_TOKENS:]))
        for size in sizes:
            tail = following[: size * TOKEN_BYTES]
            if start + size >= len(tokens):
                continue
            complete, headless = (self._tails.get(key) for key in tail_keys(block, tail))
            if complete is not None and (ended := complete.by(arrival_ms)):
                yield Candidate(start + size, ended[-1], len(ended) > 1)
                continue
            for request in () if headless is None else headless.by(arrival_ms)[-HEADERS_COMPARED:]:
                repeated = common_tokens(request.tail, tail)
                header = common_tokens(backwards(request.tail), header_of_prompt)
                if len(request.tail) == len(tail) and repeated > size - header:
                    yield Candidate(start + repeated, request, ambiguous=False)


def infer_sessions(records: Iterable[Record], block_size: int) -> SessionInference:
    """Link all records, in any order, with the evidence of the complete trace; holds them in memory."""
    unlinked = list(records)
    order = sorted(range(len(unlinked)), key=lambda i: _finish_order(unlinked[i]))
    unbounded = 2**62
    index = SessionIndex(block_size, max_blocks=unbounded, max_sessions=unbounded)
    for i in order:
        index.learn(unlinked[i])
    linked = list(unlinked)
    for i in order:
        linked[i] = index.link_learned(unlinked[i])
    return SessionInference(linked, index.inferred, index.ambiguous, index.shared_prefix)


def has_output(record: Record) -> bool:
    """Return whether the request has an output to continue: all but failures without a token."""
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
