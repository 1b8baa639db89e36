"""The capture as rounds of requests, each round with its own tokens and ids, so that nothing hits across rounds."""

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engines.dialect import Dialect
from engines.vllm import VLLM
from loadgen.core.draws import GENERATOR, TokenIds
from replay.capture import Captured
from replay.config import ReplayConfig
from replay.expansion import Expansion
from replay.fidelity import Fidelity
from replay.text import TextReplay
from tracefile import BlockHash, RequestId, SessionId
from tracefile.hashing.tokenchains import Branches

NO_REQUEST = RequestId("")


class OutputSubstitution:
    """Tokens of each hash, so far: real output tokens in place of recorded ones, so that decode-filled blocks hit.

    After each response the recorded output hashes stand for the real tokens: the end of the prompt that filled no
    block, then the output. A hash has one meaning in a run. If a prompt with made-up tokens was sent before the real
    tokens came (open loop, a parent slower than in the capture), the hash keeps the made-up tokens, and the trace gives
    the real block a new hash. The same holds for a second output with the same hash but other tokens.

    Where the capture tells to the token where chains part, a block begins with the tokens of the block that it branches
    off from, and so does the end of a prompt that fills no block.
    """

    def __init__(
        self,
        expansion: Expansion,
        reused: Mapping[BlockHash, int],
        branches: Branches | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        self._expansion = expansion
        self._branches = branches
        self._enabled = enabled
        """False: every hash stands for made-up tokens."""
        self._reused = reused
        """Output blocks that come again, each with the number of the prompt's tokens that it begins with."""
        self._real: dict[BlockHash, TokenIds] = {}
        self._made_up: set[BlockHash] = set()
        self._begun: dict[BlockHash, TokenIds] = {}
        """First tokens, as sent, of blocks that begin as others do."""
        self.substituted_blocks = 0
        self.missed_blocks = 0
        """Prompt blocks sent with made-up tokens in place of output tokens."""

    def blocks(self, hashes: Sequence[BlockHash], request_id: RequestId) -> npt.NDArray[np.uint32]:
        """Tokens of a prompt's full blocks, shape (len(hashes), block_size); fixes their meaning."""
        blocks = self._expansion.blocks(hashes, request_id)
        for index, block_hash in enumerate(hashes):
            if block_hash in self._reused:
                real = self._real.get(block_hash)
                if real is not None:
                    blocks[index] = real
                    self.substituted_blocks += 1
                    continue
                self._made_up.add(block_hash)
                self.missed_blocks += 1
            if self._branches is not None and block_hash in self._branches:
                blocks[index] = self._begin(block_hash, self._expansion.block_size)
        return blocks

    def tail(self, captured: Captured, count: int) -> TokenIds:
        """The ``count`` tokens behind a prompt's full blocks."""
        if self._branches is None or captured.unfilled is None or count >= self._expansion.block_size:
            return self._expansion.tail(count, captured.request_id)
        return self._begin(captured.unfilled, count)

    def _begin(self, block: BlockHash, count: int) -> TokenIds:
        """First tokens of a block, which they are from now on."""
        tokens = self._first(block, count)
        if len(self._begun.get(block, ())) < count:
            self._begun[block] = tokens
        return tokens

    def _first(self, block: BlockHash, count: int) -> TokenIds:
        """First tokens of a block: real, as sent before, those of the block that it branches off from, or made up."""
        tokens: TokenIds = self._expansion.blocks([block], NO_REQUEST)[0]
        known = self._real.get(block)
        if known is None:
            if count > self._reused.get(block, count):  # more than the prompt's own tokens of an output to come
                self._made_up.add(block)
            known = self._begun.get(block)
        parent = None if self._branches is None else self._branches.parent(block)
        if known is not None:
            tokens[: len(known)] = known
        elif parent is not None:
            shared = min(parent[1], count)
            tokens[:shared] = self._first(parent[0], shared)
        return tokens[:count]

    def answered(
        self,
        request_id: RequestId,
        output_hashes: Sequence[BlockHash],
        prompt: TokenIds,
        generated: Sequence[int],
        tail: BlockHash | None = None,
    ) -> list[BlockHash]:
        """Let recorded output hashes stand for real tokens; return the valid hashes. The last token has no KV yet.

        ``tail``: name of the block that the output leaves unfilled.
        """
        size = self._expansion.block_size
        computed = np.concatenate([prompt, np.asarray(generated[:-1], dtype=np.uint32)])
        first = len(prompt) // size
        count = min(len(output_hashes), len(computed) // size - first)
        true: list[BlockHash] = []
        shared = True
        for index, block_hash in enumerate(output_hashes[:count], start=first):
            tokens = computed[index * size : (index + 1) * size]
            # A block's identity is its whole prefix: behind one that differs, none is shared.
            shared = shared and self._stands_for(block_hash, tokens)
            true.append(block_hash if shared else self._expansion.rekeyed(block_hash, request_id))
        if shared and tail is not None and count == len(output_hashes):
            self._stands_for(tail, computed[(first + count) * size :][: size - 1])
        return true

    def check_integrity(self) -> None:
        """Raise AssertionError if a hash has two meanings, or an unneeded one is stored."""
        assert not self._made_up & self._real.keys()
        assert self._made_up <= self._reused.keys()
        assert self._real.keys() <= self._reused.keys()
        assert all(len(tokens) <= self._expansion.block_size for tokens in self._real.values())

    def _stands_for(self, block_hash: BlockHash, tokens: TokenIds) -> bool:
        """True if the hash stands for these tokens; sets them if it had none."""
        if block_hash not in self._reused:
            return True
        if not self._enabled or block_hash in self._made_up:
            return False
        return bool(np.array_equal(self._real.setdefault(block_hash, tokens.copy()), tokens))


@dataclass(frozen=True, slots=True)
class Link:
    """Place of a request in a session-paced replay."""

    anchor: RequestId | None
    """Nearest sent ancestor that had ended before this arrival; null: a root."""
    think_ms: float
    """From the anchor's end; 0 for a root."""


ROOT = Link(None, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Common data of the requests of a replay, or of a shard's part of it."""

    config: ReplayConfig
    model: str
    dialect: Dialect
    requests: Sequence[Captured]
    links: Mapping[RequestId, Link]
    """Empty: open loop, or a closed loop without sessions."""
    block_size: int
    width: int | None
    """Open sessions of a closed loop; null: none, or an open loop."""
    period_ms: float
    """Recorded time between starts of rounds."""
    followers: Mapping[RequestId, Sequence[Captured]]
    reused: Mapping[BlockHash, int]
    """Output blocks that come again, each with the number of the prompt's tokens that it begins with."""
    branches: Branches | None = None
    """Null: the capture tells to the block only where chains part."""
    text: TextReplay | None = None
    """Null: token ids are sent."""
    over: set[tuple[int, RequestId]] = field(default_factory=set)
    """Rounds and roots that the resumed run has ended."""
    fidelity: Fidelity = field(default_factory=Fidelity)
    rounds: dict[int, "Round"] = field(default_factory=dict)

    def round(self, number: int) -> "Round":
        """Round ``number`` from 0, begun on its first use."""
        if number not in self.rounds:
            nonce, cold = round_nonce(self.config.nonce, number), self.config.cold_prompts
            expansion = Expansion(self.block_size, nonce, self.config.vocabulary, cold)
            substitution = OutputSubstitution(
                expansion, self.reused, self.branches, enabled=self.config.output_substitution
            )
            words = None if self.text is None else Expansion(self.block_size, nonce, self.text.vocabulary(), cold)
            self.rounds[number] = Round(self, number, expansion, substitution, words)
        return self.rounds[number]

    def link(self, captured: Captured) -> Link:
        return self.links.get(captured.request_id, ROOT)

    def think_ms(self, captured: Captured) -> float:
        think_ms = self.link(captured).think_ms / self.config.speedup
        return think_ms if self.config.max_think_s is None else min(think_ms, self.config.max_think_s * 1000)

    def behind(self, captured: Captured) -> Iterator[Captured]:
        waiting = list(self.followers.get(captured.request_id, ()))
        while waiting:
            following = waiting.pop()
            yield following
            waiting += self.followers.get(following.request_id, ())

    def digest_share(self) -> int:
        """Sum of one SHA-256 per request and round; equal digests: equal prompts, save model name and real outputs."""
        config = self.config
        head = hashlib.sha256(
            f"{GENERATOR} replay {config.cold_prompts} {config.output_substitution} {config.max_think_s} "
            f"{config.speedup} {config.parallel if config.closed_loop else None} {self.block_size} "
            f"{config.vocabulary.low} {config.vocabulary.high} {self.text and self.text.name}"
            f"{config.fields if config.fields.given else ''}".encode()
        )
        total = 0
        for number in range(config.repeat):
            head_of_round = head.copy()
            head_of_round.update(f"{number} {round_nonce(config.nonce, number)}".encode())
            for captured in self.requests:
                total += int.from_bytes(self._digest(head_of_round.copy(), captured), "little")
        return total

    def _digest(self, digest: "hashlib._Hash", captured: Captured) -> bytes:
        link = self.link(captured)
        lengths = (captured.prompt_tokens, captured.output_tokens, len(captured.hashes), captured.n or 0)
        times = (captured.offset_ms, self.think_ms(captured))
        form = None if self.text is None else self.text.form_of(captured)
        api = None if form is None else form.api
        words = (captured.request_id, link.anchor, captured.session_id, captured.priority, captured.lora, api)
        branch = "" if captured.branch is None else tuple(captured.branch)
        digest.update(f"{words} {captured.stream}{branch}".encode())
        digest.update(struct.pack("<dd4q", *times, *lengths))
        digest.update(struct.pack(f"<{len(captured.hashes)}Q", *captured.hashes))
        return digest.digest()


@dataclass(frozen=True, slots=True)
class Round:
    """Pass over the trace, with tokens and ids that no other round has."""

    run: Replay
    number: int
    expansion: Expansion
    substitution: OutputSubstitution
    words: Expansion | None = None
    ends_ms: dict[RequestId, float] = field(default_factory=dict)

    def request_id(self, captured_id: RequestId) -> RequestId:
        return captured_id if self.number == 0 else RequestId(f"{captured_id}~{self.number + 1}")

    def session_id(self, captured_id: SessionId | None) -> SessionId | None:
        if captured_id is None or self.number == 0:
            return captured_id
        return SessionId(f"{captured_id}~{self.number + 1}")

    def blocks(self, captured: Captured) -> npt.NDArray[np.uint32]:
        """Tokens of a prompt's full blocks, or the words in their places."""
        words = self.words_for(captured)
        source = words or (self.expansion if self.run.config.cold_prompts else self.substitution)
        return source.blocks(captured.hashes, captured.request_id)

    def tail(self, captured: Captured, count: int) -> TokenIds:
        """The ``count`` tokens behind a prompt's full blocks, or the words in their places."""
        words = self.words_for(captured)
        if words is None and not self.run.config.cold_prompts:
            return self.substitution.tail(captured, count)
        return (words or self.expansion).tail(count, captured.request_id)

    def words_for(self, captured: Captured) -> Expansion | None:
        text = self.run.text
        return None if text is None or text.form_of(captured) is None else self.words

    def hashes(self, captured: Captured) -> list[BlockHash] | None:
        """Null: the capture has none."""
        if not captured.has_hashes:
            return None
        if self.run.config.cold_prompts:
            return [self.expansion.rekeyed(block_hash, captured.request_id) for block_hash in captured.hashes]
        return self.own(captured.hashes)

    def own(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """The capture's hashes in the first round, new ones in others."""
        return list(hashes) if self.number == 0 else [self.expansion.renamed(block_hash) for block_hash in hashes]


def make_replay(
    config: ReplayConfig,
    model: str,
    requests: Sequence[Captured],
    links: Mapping[RequestId, Link],
    block_size: int,
    *,
    dialect: Dialect = VLLM,
    width: int | None = None,
    period_ms: float = 0.0,
    branches: Branches | None = None,
    text: TextReplay | None = None,
) -> Replay:
    """``links`` empty: no request waits for another."""
    followers: dict[RequestId, list[Captured]] = defaultdict(list)
    for request in requests:
        anchor = links.get(request.request_id, ROOT).anchor
        if anchor is not None:
            followers[anchor].append(request)
    return Replay(
        config=config,
        model=model,
        dialect=dialect,
        requests=requests,
        links=links,
        block_size=block_size,
        width=width,
        period_ms=period_ms,
        followers=dict(followers),
        reused=reused_blocks(requests, block_size),
        branches=branches,
        text=text,
    )


def reused_blocks(requests: Sequence[Captured], block_size: int) -> dict[BlockHash, int]:
    """Output blocks that a prompt carries or branches off from, each with the prompt's tokens that it begins with."""
    generated: dict[BlockHash, int] = {}
    for request in requests:
        if request.output_hashes is None:
            continue
        generated |= dict.fromkeys(request.output_hashes, 0)
        generated[request.tail] = 0
        if request.unfilled is not None:
            generated[request.unfilled] = request.prompt_tokens % block_size
    again = {block for request in requests for block in request.hashes if block in generated}
    again |= {request.branch.block for request in requests if request.branch is not None}
    return {block: generated[block] for block in again if block in generated}


def round_nonce(nonce: str, number: int) -> str:
    return nonce if number == 0 else f"{nonce}~{number + 1}"


def link_requests(requests: Sequence[Captured]) -> dict[RequestId, Link]:
    """Link every request to its anchor, from the parents that the records name.

    A child that came before its parent had ended did not wait for it: its anchor is the next ancestor, or it is a root.
    So is the child of a request that cannot be sent. A join waits for its recorded parent, the last one to end.
    """
    known = {request.request_id: request for request in requests}
    return {request_id: _link(request, known) for request_id, request in known.items()}


def _link(request: Captured, known: Mapping[RequestId, Captured]) -> Link:
    parent_id = request.parent_id
    while parent_id is not None and parent_id in known:
        ancestor = known[parent_id]
        if ancestor.end_ms is not None and ancestor.end_ms <= request.offset_ms:
            return Link(parent_id, request.offset_ms - ancestor.end_ms)
        parent_id = ancestor.parent_id
    return ROOT
