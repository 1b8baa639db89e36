"""The capture as a plan for loadgen's sender: at its recorded times, each turn after the one before, or slot by slot.

Several rounds of one trace are sent one after another, each with tokens and ids of its own, so that nothing hits
across them.
"""

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import islice

from engines.dialect import Dialect
from engines.vllm import VLLM
from loadgen.core.draws import GENERATOR
from loadgen.core.plan import Send
from replay.capture import Captured
from replay.config import ReplayConfig
from replay.expansion import Expansion
from replay.fidelity import Fidelity
from replay.links import ROOT, Link
from replay.sending import Replayed, Round
from replay.slots import Slot
from replay.splicing import Splicer
from replay.text import TextReplay
from tracefile import BlockHash, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One replay, or a shard's part of it: what all its requests have in common."""

    config: ReplayConfig
    model: str
    dialect: Dialect
    requests: Sequence[Captured]
    """In order of arrival."""
    links: Mapping[RequestId, Link]
    """Every request's place in its session; empty: open loop, or a closed one without sessions."""
    block_size: int
    width: int | None
    """Sessions that a closed loop has open at once; null: it has none, or is an open one."""
    period_ms: float
    """From one round's beginning to the next one's, as recorded."""
    followers: Mapping[RequestId, Sequence[Captured]]
    reused: AbstractSet[BlockHash]
    """Generated blocks that some prompt carries."""
    text: TextReplay | None = None
    """Makes words of tokens; null: the tokens are sent."""
    over: set[tuple[int, RequestId]] = field(default_factory=set)
    """Rounds and roots that an earlier part of the run has sent to their end."""
    fidelity: Fidelity = field(default_factory=Fidelity)
    rounds: dict[int, Round] = field(default_factory=dict)
    """Those begun."""

    def plan(self) -> Iterator[Send]:
        """The roots in order of time, the others follow from them; in a closed loop, in order alone."""
        roots = self.roots()
        if self.width is None:
            for root in roots:
                yield root.send(None if self.config.closed_loop else root.due_ms())
            return
        for root in islice(roots, self.width):
            root.slot = Slot(roots)
            yield root.send(0.0)

    def roots(self) -> Iterator[Replayed]:
        """What waits for nothing, of all rounds."""
        for number in range(self.config.repeat):
            for captured in self.requests:
                if self.link(captured).anchor is None and (number, captured.request_id) not in self.over:
                    yield Replayed(self.round(number), captured)

    def round(self, number: int) -> Round:
        """Round ``number`` from 0, begun when first asked for."""
        if number not in self.rounds:
            nonce, cold = round_nonce(self.config.nonce, number), self.config.cold_prompts
            expansion = Expansion(self.block_size, nonce, self.config.vocabulary, cold)
            splicer = Splicer(expansion, self.reused, enabled=self.config.splice)
            words = None if self.text is None else Expansion(self.block_size, nonce, self.text.vocabulary(), cold)
            self.rounds[number] = Round(self, number, expansion, splicer, words)
        return self.rounds[number]

    def link(self, captured: Captured) -> Link:
        """A request's place."""
        return self.links.get(captured.request_id, ROOT)

    def think_ms(self, captured: Captured) -> float:
        """The pause before a request that waited for another one's end."""
        think_ms = self.link(captured).think_ms / self.config.speedup
        return think_ms if self.config.max_think_s is None else min(think_ms, self.config.max_think_s * 1000)

    def behind(self, captured: Captured) -> Iterator[Captured]:
        """All that comes after a request in its session."""
        waiting = list(self.followers.get(captured.request_id, ()))
        while waiting:
            following = waiting.pop()
            yield following
            waiting += self.followers.get(following.request_id, ())

    def digest_share(self) -> int:
        """One SHA-256 for each request of each round, summed: its time or pause, lengths, hashes, shape, tokens' key.

        Tokens are a fixed function of hash, nonce and request id, so equal digests mean equal prompts, save the
        model's name, the engine's own fields and real answers.
        """
        config = self.config
        head = hashlib.sha256(
            f"{GENERATOR} replay {config.cold_prompts} {config.splice} {config.max_think_s} {config.speedup} "
            f"{config.parallel if config.closed_loop else None} {self.block_size} "
            f"{config.vocabulary.low} {config.vocabulary.high} {self.text and self.text.name}".encode()
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
        digest.update(f"{words} {captured.stream}".encode())
        digest.update(struct.pack("<dd4q", *times, *lengths))
        digest.update(struct.pack(f"<{len(captured.hashes)}Q", *captured.hashes))
        return digest.digest()


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
    text: TextReplay | None = None,
) -> Replay:
    """A replay ready to be sent; ``links`` empty: no request waits for another."""
    generated = {block_hash for request in requests for block_hash in request.output_hashes or ()}
    carried = {block_hash for request in requests for block_hash in request.hashes if block_hash in generated}
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
        reused=frozenset(carried),
        text=text,
    )


def round_nonce(nonce: str, number: int) -> str:
    """The nonce of round ``number`` from 0; the first one's is the run's."""
    return nonce if number == 0 else f"{nonce}~{number + 1}"
