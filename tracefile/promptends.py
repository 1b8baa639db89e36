"""Ends of prompts and outputs: requests that a later prompt may continue, by block and by the tokens behind it."""

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tracefile.hashing.blockhash import TOKEN_BYTES
from tracefile.records.schema import BlockHash, RequestId, SessionId

ENDS_KEPT = 1024
"""Requests remembered that ended on one block or in one session; the earliest are forgotten first."""
HEADER_TOKENS = 8
"""Most tokens at a chat prompt's end, which begin the answer, that later prompts may change."""
HEADERS_COMPARED = 16
"""Latest candidates with such an end that are compared with a prompt."""


class Ended(NamedTuple):
    """A request that may be continued."""

    end_ms: float
    request_id: RequestId
    session_id: SessionId | None
    turn: int
    prompt_tokens: int
    output_tokens: int | None
    prompt_end: BlockHash | None
    """The prompt's last full block. Null: it has none, or it is not known."""
    blocks: int
    """Blocks of its chain, output included."""
    output_end: BlockHash | None
    """The last block of its output. Null: no block of it is known."""
    rest: bytes = b""
    """Prompt tokens behind the block under which it is kept."""


@dataclass(slots=True)
class Ending:
    """Requests whose prompts end on one block (or in one session), by end, and what is known of who goes on there."""

    shared: bool = False
    """Rule 3's (a) or (b) was seen."""
    first_end_ms: float = float("inf")
    continuation: BlockHash | None = None
    """The next block of the prompts that went on."""
    ended: list[Ended] = field(default_factory=list)

    def add(self, request: Ended) -> None:
        """Remember one more; given in finish order, that is at the end."""
        if not self.ended or self.ended[-1].end_ms <= request.end_ms:
            self.ended.append(request)
        else:
            self.ended.insert(bisect_right(self.ended, request.end_ms, key=_end_ms), request)
        if len(self.ended) > 2 * ENDS_KEPT:
            del self.ended[:ENDS_KEPT]

    def by(self, at_ms: float) -> Sequence[Ended]:
        """Return the requests that had ended at ``at_ms``."""
        if self.ended and self.ended[-1].end_ms <= at_ms:
            return self.ended
        return self.ended[: bisect_right(self.ended, at_ms, key=_end_ms)]

    def passed(self, arrival_ms: float, following: BlockHash | None) -> None:
        """Note a prompt that goes on past here with block ``following`` (None: not known)."""
        if arrival_ms < self.first_end_ms:
            self.shared = True
        elif following is not None:
            self.continuation = self.continuation or following
            self.shared = self.shared or following != self.continuation


def _end_ms(request: Ended) -> float:
    return request.end_ms


@dataclass(slots=True)
class Ends:
    """Requests that end on a block, or whose output holds it."""

    passed: bool = False
    """A prompt goes on past the block."""
    outputs: Ending | None = None
    """Requests whose outputs hold the block; successive blocks of one output have the same."""
    prompts: Ending | None = None
    """Requests whose prompts end on the block, where only blocks are known."""
    rests: tuple[int, ...] = ()
    """Tokens behind the block of the prompts of known tokens that end there."""


class Rest(NamedTuple):
    """End of prompts whose tokens are known."""

    block: Hashable
    """The last block before HEADER_TOKENS; of a prompt without one, its model."""
    tokens: bytes
    """Tokens behind the block, the prompt's last HEADER_TOKENS included or not."""
    complete: bool


class Candidate(NamedTuple):
    """Possible parent of a request."""

    repeated: int
    """Tokens of its chain with which the request's prompt begins."""
    parent: Ended
    ambiguous: bool


def rests_of(block: Hashable, tokens: bytes) -> tuple[Rest, Rest]:
    """Keys of a prompt's tokens behind ``block``: all of them, and those before the last HEADER_TOKENS."""
    return Rest(block, tokens, True), Rest(block, tokens[: -HEADER_TOKENS * TOKEN_BYTES], False)


def rank(candidate: Candidate) -> tuple[int, float]:
    """Order of candidates: more repeated tokens, then a later end."""
    return candidate.repeated, candidate.parent.end_ms


def by_output(ends: Ends, at: int, repeated: int, arrival_ms: float) -> Iterator[Candidate]:
    """Yield the request whose output holds the prompt's block ``at``: one that it repeats completely, if any."""
    if ends.outputs is None or not (ended := ends.outputs.by(arrival_ms)):
        return
    complete = [request for request in ended if request.blocks == at + 1]
    yield Candidate(repeated, (complete or ended)[-1], len(complete or ended) > 1)


def common_tokens(one: bytes, other: bytes) -> int:
    """Count the tokens with which both begin."""
    longest = min(len(one), len(other)) // TOKEN_BYTES
    steps = range(0, longest * TOKEN_BYTES, TOKEN_BYTES)
    differ = (at // TOKEN_BYTES for at in steps if one[at : at + TOKEN_BYTES] != other[at : at + TOKEN_BYTES])
    return next(differ, longest)


def backwards(tokens: bytes) -> bytes:
    """The last HEADER_TOKENS tokens, the last one first."""
    last = tokens[-HEADER_TOKENS * TOKEN_BYTES :]
    return b"".join(last[at : at + TOKEN_BYTES] for at in range(len(last) - TOKEN_BYTES, -1, -TOKEN_BYTES))
