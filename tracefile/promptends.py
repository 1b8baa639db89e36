"""Ends of prompts and outputs: requests that a later prompt may continue, by block and by later tokens."""

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tracefile.hashing.blockhash import TOKEN_BYTES
from tracefile.records.schema import BlockHash, RequestId, SessionId

MAX_ENDS = 1024
"""Maximum requests stored for a block or a session; the earliest are evicted first."""
HEADER_TOKENS = 8
"""Maximum tokens of the generation header at a chat prompt's end, which later prompts may change."""
HEADERS_COMPARED = 16
"""Latest candidates with a changed header that are compared with a prompt."""


class FinishedRequest(NamedTuple):
    """A finished request that a later prompt may continue."""

    end_ms: float
    request_id: RequestId
    session_id: SessionId | None
    turn: int
    prompt_tokens: int
    output_tokens: int | None
    prompt_end: BlockHash | None
    """Last full block of the prompt. Null: none, or unknown."""
    blocks: int
    """Blocks of the chain, output included."""
    output_end: BlockHash | None
    """Last block of the output. Null: no block is known."""
    tail: bytes = b""
    """Prompt tokens after the block under which the request is stored."""


@dataclass(slots=True)
class RequestsByEnd:
    """Finished requests whose prompts end on one block (or in one session), and how later prompts continue there."""

    shared: bool = False
    """Rule 3 (a) or (b) applies: the block ends a shared prefix."""
    first_end_ms: float = float("inf")
    continuation: BlockHash | None = None
    """Next block of the prompts that continue past the block."""
    ended: list[FinishedRequest] = field(default_factory=list)

    def add(self, request: FinishedRequest) -> None:
        """Add a request; in finish order, this appends."""
        if not self.ended or self.ended[-1].end_ms <= request.end_ms:
            self.ended.append(request)
        else:
            self.ended.insert(bisect_right(self.ended, request.end_ms, key=_end_ms), request)
        if len(self.ended) > 2 * MAX_ENDS:
            del self.ended[:MAX_ENDS]

    def by(self, at_ms: float) -> Sequence[FinishedRequest]:
        """Return the requests that ended at or before ``at_ms``."""
        if self.ended and self.ended[-1].end_ms <= at_ms:
            return self.ended
        return self.ended[: bisect_right(self.ended, at_ms, key=_end_ms)]

    def continue_with(self, arrival_ms: float, following: BlockHash | None) -> None:
        """Add a prompt that continues past the block with block ``following`` (None: unknown)."""
        if arrival_ms < self.first_end_ms:
            self.shared = True
        elif following is not None:
            self.continuation = self.continuation or following
            self.shared = self.shared or following != self.continuation


def _end_ms(request: FinishedRequest) -> float:
    return request.end_ms


@dataclass(slots=True)
class BlockEnds:
    """Finished requests whose prompts end on a block, or whose outputs contain the block."""

    continued: bool = False
    """A prompt continues past the block."""
    outputs: RequestsByEnd | None = None
    """Requests whose outputs contain the block; consecutive blocks of an output share the object."""
    prompts: RequestsByEnd | None = None
    """Requests whose prompts end on the block, if only block hashes are known."""
    tail_sizes: tuple[int, ...] = ()
    """Numbers of tokens after the block, of prompts with known token ids that end there."""


class PromptTail(NamedTuple):
    """End of a prompt with known token ids."""

    block: Hashable
    """Last block before HEADER_TOKENS; the model, for a prompt without such a block."""
    tokens: bytes
    """Packed tokens after the block, with or without the last HEADER_TOKENS."""
    complete: bool


class Candidate(NamedTuple):
    """Possible parent of a request."""

    repeated: int
    """Length of the common prefix of its chain and the request's prompt, in tokens."""
    parent: FinishedRequest
    ambiguous: bool


def tail_keys(block: Hashable, tokens: bytes) -> tuple[PromptTail, PromptTail]:
    """Return the keys of a prompt's tokens after ``block``: with and without the last HEADER_TOKENS."""
    return PromptTail(block, tokens, True), PromptTail(block, tokens[: -HEADER_TOKENS * TOKEN_BYTES], False)


def rank(candidate: Candidate) -> tuple[int, float]:
    """Sort key of candidates: more repeated tokens, then a later end."""
    return candidate.repeated, candidate.parent.end_ms


def by_output(ends: BlockEnds, at: int, repeated: int, arrival_ms: float) -> Iterator[Candidate]:
    """Yield the request whose output contains block ``at`` of the prompt, preferably an output that ends there."""
    if ends.outputs is None or not (ended := ends.outputs.by(arrival_ms)):
        return
    complete = [request for request in ended if request.blocks == at + 1]
    yield Candidate(repeated, (complete or ended)[-1], len(complete or ended) > 1)


def common_tokens(left: bytes, right: bytes) -> int:
    """Return the length of the common prefix in tokens."""
    longest = min(len(left), len(right)) // TOKEN_BYTES
    steps = range(0, longest * TOKEN_BYTES, TOKEN_BYTES)
    differ = (at // TOKEN_BYTES for at in steps if left[at : at + TOKEN_BYTES] != right[at : at + TOKEN_BYTES])
    return next(differ, longest)


def backwards(tokens: bytes) -> bytes:
    """Return the last HEADER_TOKENS tokens in reverse order."""
    header = tokens[-HEADER_TOKENS * TOKEN_BYTES :]
    return b"".join(header[at : at + TOKEN_BYTES] for at in range(len(header) - TOKEN_BYTES, -1, -TOKEN_BYTES))
