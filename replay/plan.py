"""The capture as a plan for loadgen's sender: at its recorded times, or each turn after the one before."""

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.bodies import completions_body
from loadgen.draws import GENERATOR, TokenIds
from loadgen.plan import Answer, Send
from loadgen.prompts import COMPLETIONS_PATH
from loadgen.request import PlannedRequest, request_headers
from replay.capture import Captured
from replay.config import ReplayConfig
from replay.expansion import Expansion
from replay.fidelity import Fidelity
from replay.links import Link
from replay.splicing import Splicer
from tracefile import BlockHash, Record, RequestId

ROOT = Link(None, 0.0)


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay: what all its requests have in common."""

    config: ReplayConfig
    model: str
    requests: Sequence[Captured]
    links: Mapping[RequestId, Link]
    """Every request's place in its session; empty: open loop."""
    expansion: Expansion
    splicer: Splicer
    fidelity: Fidelity
    followers: Mapping[RequestId, Sequence[Captured]]
    ends_ms: dict[RequestId, float] = field(default_factory=dict)
    """When each request ended in this run."""

    def link(self, captured: Captured) -> Link:
        """A request's place."""
        return self.links.get(captured.record.request_id, ROOT)

    def plan(self) -> Iterator[Send]:
        """The roots in order of time; the others follow from them."""
        for captured in self.requests:
            if self.link(captured).anchor is None:
                yield Replayed(self, captured).send(captured.offset_ms / self.config.speedup)

    def follow(self, captured: Captured) -> Send:
        """A request that waited for another one's end, as many ms after it as then."""
        think_ms = self.link(captured).think_ms / self.config.speedup
        if self.config.max_think_s is not None:
            think_ms = min(think_ms, self.config.max_think_s * 1000)
        return Replayed(self, captured).send(think_ms)

    def blocks(self, captured: Captured) -> npt.NDArray[np.uint32]:
        """The tokens of a prompt's full blocks."""
        source = self.expansion if self.config.cold_prompts else self.splicer
        return source.blocks(captured.hashes, captured.record.request_id)

    def count_behind(self, request_id: RequestId) -> int:
        """How many requests come after this one in its session."""
        waiting = list(self.followers.get(request_id, ()))
        count = 0
        while waiting:
            count += 1
            waiting += self.followers.get(waiting.pop().record.request_id, ())
        return count

    def final_fidelity(self) -> Fidelity:
        """How true the run was, now that it is over."""
        self.fidelity.spliced_blocks = self.splicer.spliced_blocks
        self.fidelity.missed_blocks = self.splicer.missed_blocks
        return self.fidelity

    def digest(self) -> str:
        """SHA-256, hex, over everything the bodies and their times are made from; equal digests mean equal traffic.

        Save the model's name and the answers: token ids are a fixed function of hash, nonce, block size and vocabulary.
        """
        config, vocabulary = self.config, self.config.vocabulary
        digest = hashlib.sha256(
            f"{GENERATOR} replay {config.nonce} {config.cold_prompts} {config.max_think_s}".encode()
        )
        digest.update(struct.pack("<dQQQ", config.speedup, self.expansion.block_size, vocabulary.low, vocabulary.high))
        for captured in self.requests:
            link = self.link(captured)
            times = (captured.offset_ms if link.anchor is None else link.think_ms,)
            lengths = (captured.prompt_tokens, captured.output_tokens, len(captured.hashes))
            digest.update(f"{captured.record.request_id}\0{link.anchor}\0".encode())
            digest.update(struct.pack("<dQQQ", *times, *lengths))
            digest.update(np.array(captured.hashes, dtype="<u8").tobytes())
        return digest.hexdigest()


def make_replay(
    config: ReplayConfig, model: str, requests: Sequence[Captured], links: Mapping[RequestId, Link], block_size: int
) -> Replay:
    """A replay ready to be sent; ``links`` empty: open loop."""
    expansion = Expansion(block_size, config.nonce, config.vocabulary, config.cold_prompts)
    carried = {block_hash for request in requests for block_hash in request.hashes}
    generated = {block_hash for request in requests for block_hash in request.record.output_block_hashes or ()}
    followers: dict[RequestId, list[Captured]] = defaultdict(list)
    for request in requests:
        link = links.get(request.record.request_id, ROOT)
        if link.anchor is not None:
            followers[link.anchor].append(request)
    splicer = Splicer(expansion, carried & generated)
    return Replay(config, model, requests, links, expansion, splicer, Fidelity(), dict(followers))


@dataclass(slots=True)
class Replayed:
    """One request on its way: planned, built, answered, described."""

    run: Replay
    captured: Captured
    prompt: TokenIds | None = None
    output_hashes: list[BlockHash] | None = None

    def send(self, due_ms: float) -> Send:
        """The request as the sender takes it."""
        return Send(due_ms, self.build, self.follow_ups, self.describe)

    def build(self) -> PlannedRequest:
        """The request with its tokens, real ones where they are known by now."""
        captured, record = self.captured, self.captured.record
        blocks = self.run.blocks(captured).ravel()
        tail = self.run.expansion.tail(captured.prompt_tokens - len(blocks), record.request_id)
        self.prompt = np.concatenate([blocks, tail])
        stream = record.stream is not False
        per_choice = -(-captured.output_tokens // (record.n or 1))
        return PlannedRequest(
            request_id=record.request_id,
            path=COMPLETIONS_PATH,
            headers=request_headers(record.request_id, record.session_id),
            body=completions_body(self.run.model, self.prompt, per_choice, stream=stream, extra=_shape(record)),
            model=self.run.model,
            max_tokens=per_choice,
            prompt_tokens=captured.prompt_tokens,
            stream=stream,
            session_id=record.session_id,
            parent_id=record.parent_id,
            turn=record.turn,
            n=record.n,
            priority=record.priority,
        )

    def follow_ups(self, answer: Answer) -> Sequence[Send]:
        """What waited for this one; nothing after a failure."""
        request_id = self.captured.record.request_id
        self.run.ends_ms[request_id] = answer.end_ms
        self._splice(answer)
        if not answer.ok:
            self.run.fidelity.not_sent += self.run.count_behind(request_id)
            return ()
        return [self.run.follow(follower) for follower in self.run.followers.get(request_id, ())]

    def describe(self, answer: Answer) -> Record:
        """The record under the capture's ids and hashes, as far as they are true of what was sent."""
        captured, source = self.captured, self.captured.record
        self.prompt = None
        self._count(answer)
        hashes: list[BlockHash] | None = captured.hashes if source.block_hashes is not None else None
        if hashes and self.run.config.cold_prompts:
            hashes = [self.run.expansion.rekeyed(block_hash, source.request_id) for block_hash in hashes]
        parent_end_ms = None if source.parent_id is None else self.run.ends_ms.get(source.parent_id)
        arrival_ms = answer.record.arrival_ms
        return msgspec.structs.replace(
            answer.record,
            session_source=source.session_source,
            block_hashes=hashes,
            output_block_hashes=self.output_hashes,
            hash_source=source.hash_source if hashes is not None else None,
            think_ms=None if parent_end_ms is None or arrival_ms is None else round(arrival_ms - parent_end_ms, 3),
        )

    def _splice(self, answer: Answer) -> None:
        """Let later prompts have the real tokens; the output hashes become those that are true here."""
        recorded = self.captured.record.output_block_hashes
        if not answer.ok or answer.token_ids is None or recorded is None or self.prompt is None:
            return
        request_id = self.captured.record.request_id
        if self.run.config.cold_prompts:
            self.output_hashes = [self.run.expansion.rekeyed(block_hash, request_id) for block_hash in recorded]
        else:
            self.output_hashes = self.run.splicer.answered(request_id, recorded, self.prompt, answer.token_ids)

    def _count(self, answer: Answer) -> None:
        fidelity = self.run.fidelity
        fidelity.add(self.captured, answer.record)
        fidelity.without_hashes += self.captured.record.block_hashes is None
        fidelity.without_ids += (
            answer.ok and answer.token_ids is None and bool(self.captured.record.output_block_hashes)
        )


def _shape(record: Record) -> dict[str, Any]:
    """What else of a request's shape the engine is told."""
    return {name: value for name in ("n", "priority") if (value := getattr(record, name)) is not None}
