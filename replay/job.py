"""A replay as a job: each worker plans requests, builds token prompts, sends follow-ups, completes records."""

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt

from engines.detection import DIALECTS
from engines.dialect import Dialect, DialectName
from engines.vllm import VLLM
from loadgen.core.bodies import completions_body
from loadgen.core.draws import GENERATOR, TokenIds
from loadgen.core.job import Plan, Response, Send, Shard
from loadgen.core.request import PlannedRequest, request_headers
from loadgen.text.prompts import ChatPrompt
from replay.capture import Captured, load_capture
from replay.config import ReplayConfig
from replay.expansion import Expansion
from replay.fidelity import Fidelity
from replay.substitution import OutputSubstitution, reused_blocks
from replay.survey import Survey
from replay.text import Exchange, TextReplay, TextTarget, continues, open_text
from tracefile.hashing.tokenchains import Branches
from tracefile.records.schema import BlockHash, Record, RequestId

FOLLOWERS = "followers"
"""Finding that counts requests that waited for a parent."""


@dataclass(frozen=True, slots=True)
class Link:
    """Position of a request in a session-paced replay."""

    anchor: RequestId | None
    """Nearest ancestor in the replay that had ended before this arrival; null: a root."""
    think_ms: float
    """Think time from the end of the anchor; 0 for a root."""


ROOT = Link(None, 0.0)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Data shared by all requests of a replay, or of one worker's shard: model, block size, links, fidelity counts."""

    config: ReplayConfig
    model: str
    requests: Sequence[Captured]
    links: Mapping[RequestId, Link]
    """Empty: no request waits for another."""
    block_size: int
    dialect: Dialect = VLLM
    width: int | None = None
    """Limit of open sessions in a closed loop; null: no limit, or an open loop."""
    branches: Branches | None = None
    """Null: the capture names only the block where hash chains diverge."""
    text: TextReplay | None = None
    """Null: prompts are token ids."""
    fidelity: Fidelity = field(default_factory=Fidelity)
    ends_ms: dict[RequestId, float] = field(default_factory=dict)

    @cached_property
    def expansion(self) -> Expansion:
        config = self.config
        return Expansion(self.block_size, config.nonce, config.vocabulary, config.cold_prompts)

    @cached_property
    def words(self) -> Expansion | None:
        """Expansion of block hashes to words; null: all prompts are token ids."""
        if self.text is None:
            return None
        return Expansion(self.block_size, self.config.nonce, self.text.vocabulary(), self.config.cold_prompts)

    @cached_property
    def substitution(self) -> OutputSubstitution:
        reused = reused_blocks(self.requests, self.block_size)
        enabled = self.config.output_substitution
        return OutputSubstitution(self.expansion, reused, self.branches, enabled=enabled)

    @cached_property
    def followers(self) -> Mapping[RequestId, Sequence[Captured]]:
        followers: dict[RequestId, list[Captured]] = defaultdict(list)
        for request in self.requests:
            anchor = self.link(request).anchor
            if anchor is not None:
                followers[anchor].append(request)
        return dict(followers)

    def link(self, captured: Captured) -> Link:
        return self.links.get(captured.request_id, ROOT)

    def descendants(self, captured: Captured) -> Iterator[Captured]:
        """All requests that wait for this request, directly or through others."""
        waiting = list(self.followers.get(captured.request_id, ()))
        while waiting:
            following = waiting.pop()
            yield following
            waiting += self.followers.get(following.request_id, ())

    def words_for(self, captured: Captured) -> Expansion | None:
        return None if self.text is None or self.text.form_of(captured) is None else self.words

    def prompt(self, captured: Captured) -> TokenIds:
        """Tokens of a prompt, or the words in their positions."""
        words = self.words_for(captured)
        if words is None and not self.config.cold_prompts:
            blocks: npt.NDArray[np.uint32] = self.substitution.blocks(captured.hashes, captured.request_id).ravel()
            tail = self.substitution.tail(captured, captured.prompt_tokens - len(blocks))
        else:
            source = words or self.expansion
            blocks = source.blocks(captured.hashes, captured.request_id).ravel()
            tail = source.tail(captured.prompt_tokens - len(blocks), captured.request_id)
        return np.concatenate([blocks, tail])

    def hashes(self, captured: Captured) -> list[BlockHash] | None:
        """Block hashes valid in this run; null: none in the capture."""
        if not captured.has_hashes:
            return None
        if self.config.cold_prompts:
            return [self.expansion.rekeyed(block_hash, captured.request_id) for block_hash in captured.hashes]
        return list(captured.hashes)

    def digest_share(self) -> int:
        """Sum of one SHA-256 a request; equal: equal prompt tokens, except model name and substituted outputs."""
        config = self.config
        head = hashlib.sha256(
            f"{GENERATOR} replay {config.cold_prompts} {config.output_substitution} "
            f"{config.speedup} {config.parallel if config.closed_loop else None} {self.block_size} "
            f"{config.vocabulary.low} {config.vocabulary.high} {self.text and self.text.name}"
            f"{config.fields if config.fields.customised else ''}{config.nonce}".encode()
        )
        return sum(int.from_bytes(self._digest(head.copy(), captured), "little") for captured in self.requests)

    def _digest(self, digest: "hashlib._Hash", captured: Captured) -> bytes:
        link = self.link(captured)
        lengths = (captured.prompt_tokens, captured.output_tokens, len(captured.hashes), captured.n or 0)
        form = None if self.text is None else self.text.form_of(captured)
        api = None if form is None else form.api
        words = (captured.request_id, link.anchor, captured.session_id, captured.priority, captured.lora, api)
        branch = "" if captured.branch is None else tuple(captured.branch)
        digest.update(f"{words} {captured.stream}{branch}".encode())
        digest.update(struct.pack("<dd4q", captured.offset_ms, link.think_ms, *lengths))
        digest.update(struct.pack(f"<{len(captured.hashes)}Q", *captured.hashes))
        return digest.digest()


@dataclass(slots=True)
class Slot:
    """Slot of a closed loop, occupied by a session until all its requests have ended."""

    waiting: "Iterator[Replayed]"
    open: int = 1

    def ended(self, followers: int) -> Sequence[Send]:
        """Record an ended request with ``followers`` follow-ups; return the next root if the slot is free."""
        self.open += followers - 1
        if self.open:
            return ()
        following = next(self.waiting, None)
        if following is None:
            return ()
        self.open = 1
        following.slot = self
        return [following.send(0.0)]


@dataclass(slots=True)
class Replayed:
    """Request of a replay: built, sent, followed up, described."""

    run: Replay
    captured: Captured
    slot: Slot | None = None
    before: Exchange | None = None
    prompt: TokenIds | None = None
    chat: ChatPrompt | None = None
    output_hashes: list[BlockHash] | None = None

    def send(self, due_ms: float | None) -> Send:
        """``due_ms`` null: as soon as a slot is free."""
        return Send(due_ms, self.build, self.follow_ups, self.describe)

    def build(self) -> PlannedRequest:
        captured, run = self.captured, self.run
        self.prompt = run.prompt(captured)
        choices = captured.n or 1
        per_choice = -(-captured.output_tokens // choices)
        shape = self._model() | run.dialect.shape_fields(
            n=captured.n, priority=captured.priority, prompt_logprobs=captured.prompt_logprobs
        )
        path, body = self._body(self.prompt, per_choice, shape)
        return PlannedRequest(
            request_id=captured.request_id,
            path=path,
            headers=request_headers(captured.request_id, captured.session_id, run.config.session_headers),
            body=body,
            model=str(shape["model"]),
            max_tokens=per_choice,
            prompt_tokens=captured.prompt_tokens,
            stream=captured.stream,
            session_id=captured.session_id,
            parent_id=captured.parent_id,
            turn=captured.turn,
            n=captured.n,
            priority=captured.priority if run.config.fields.priority is None else run.config.fields.priority,
        )

    def follow_ups(self, response: Response) -> Sequence[Send]:
        """Requests that waited for this request (none after a failure), and the next root of its slot."""
        run, captured = self.run, self.captured
        run.ends_ms[captured.request_id] = response.end_ms
        exchange = self._exchange(response)
        self._substitute(response)
        followers: list[Send] = []
        if response.ok:
            for follower in run.followers.get(captured.request_id, ()):
                due_ms = run.link(follower).think_ms / run.config.speedup
                followers.append(Replayed(run, follower, self.slot, exchange).send(due_ms))
        else:
            descendants = sum(1 for _ in run.descendants(captured))
            run.fidelity.leave(descendants, response.record.error or response.record.status)
        return followers if self.slot is None else [*followers, *self.slot.ended(len(followers))]

    def describe(self, response: Response) -> Record:
        """Record with the capture's ids and block hashes, as far as they match the replayed request."""
        captured, run = self.captured, self.run
        self.prompt = self.chat = None
        run.fidelity.add(captured, response.record)
        as_token_ids = run.words_for(captured) is None
        without_ids = as_token_ids and response.ok and response.token_ids is None
        run.fidelity.without_ids += without_ids and bool(captured.output_hashes)
        hashes = run.hashes(captured)
        parent_end_ms = None if captured.parent_id is None else run.ends_ms.get(captured.parent_id)
        arrival_ms = response.record.arrival_ms
        return msgspec.structs.replace(
            response.record,
            session_source=captured.session_source,
            lora=captured.lora,
            prompt_logprobs=(captured.prompt_logprobs and bool(run.dialect.prompt_logprobs)) or None,
            block_hashes=hashes,
            output_block_hashes=self.output_hashes,
            hash_source=captured.hash_source if hashes is not None else None,
            think_ms=None if parent_end_ms is None or arrival_ms is None else round(arrival_ms - parent_end_ms, 3),
        )

    def _model(self) -> dict[str, object]:
        run, lora = self.run, self.captured.lora
        adapter = "" if lora is None else run.config.loras.get(lora, lora)
        return run.dialect.lora(run.model, adapter) if adapter else {"model": run.model}

    def _body(self, prompt: TokenIds, tokens: int, shape: Mapping[str, object]) -> tuple[str, bytes]:
        run, stream, fields = self.run, self.captured.stream, self.run.config.fields
        if run.text is None or run.text.form_of(self.captured) is None:
            extra = {**shape, **fields.patch()}
            body = completions_body(run.model, prompt, tokens, stream=stream, extra=extra, dialect=run.dialect)
            return run.dialect.path, body
        self.chat = run.text.prompt(self.captured, prompt, self.before)
        return self.chat.path, run.text.body(self.chat, run.model, tokens, stream=stream, shape=shape, fields=fields)

    def _exchange(self, response: Response) -> Exchange | None:
        """Exchange for prompts that continue this output; null: none may."""
        config = self.run.config
        if self.chat is None:
            return None
        self.chat.resolve(response)
        may_continue = config.output_substitution and not config.cold_prompts and response.ok
        return Exchange(self.captured, self.chat, response) if may_continue else None

    def _substitute(self, response: Response) -> None:
        """Use the generated output tokens in later prompts; set the output block hashes valid in this run."""
        run, captured, recorded = self.run, self.captured, self.captured.output_hashes
        if not response.ok or response.token_ids is None or recorded is None or self.prompt is None:
            return
        if self.chat is not None:
            # Only followers continue this output. Other requests with its block hashes have synthetic words there.
            waiting = run.followers.get(captured.request_id, ())
            if not captured.as_long(response.record):
                return
            if run.config.output_substitution and any(continues(follower, captured) for follower in waiting):
                self.output_hashes = list(recorded)
                return
        if self.chat is not None or run.config.cold_prompts:
            self.output_hashes = [run.expansion.rekeyed(block, captured.request_id) for block in recorded]
            return
        self.output_hashes = run.substitution.answered(
            captured.request_id, recorded, self.prompt, response.token_ids, captured.tail
        )


def plan_sends(replay: Replay) -> Iterator[Send]:
    """Yield root requests in order of time, in a closed loop in recorded order. Follow-ups come from responses."""
    config = replay.config
    roots = (Replayed(replay, captured) for captured in replay.requests if replay.link(captured).anchor is None)
    if replay.width is None:
        for root in roots:
            yield root.send(None if config.closed_loop else root.captured.offset_ms / config.speedup)
        return
    for root in islice(roots, replay.width):
        root.slot = Slot(roots)
        yield root.send(0.0)


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """Picklable replay: each process opens its shard and reads the requests from the trace."""

    config: ReplayConfig
    survey: Survey
    model: str
    dialect: DialectName
    text: TextTarget | None = None
    """Null: prompts are token ids."""

    def open(self, shard: Shard) -> "OpenReplay":
        config, dialect = self.config, DIALECTS[self.dialect]
        requests, branches = load_capture(
            self.survey,
            config.selection,
            shard=shard,
            sessions=config.replay_sessions,
            output_substitution=config.output_substitution and not config.cold_prompts,
        )
        in_sessions = config.closed_loop and config.replay_sessions
        replay = Replay(
            config=config,
            model=self.model,
            requests=requests,
            links=link_requests(requests) if config.replay_sessions else {},
            block_size=self.survey.block_size,
            dialect=dialect,
            width=shard.share_of(config.parallel) if in_sessions else None,
            branches=branches if self.text is None else None,
            text=None if self.text is None else open_text(self.text, dialect, self.survey.block_size),
        )
        return OpenReplay(replay)


@dataclass(slots=True)
class OpenReplay:
    """Shard of a replay in one worker, ready to send."""

    replay: Replay

    def plan(self) -> Plan:
        return plan_sends(self.replay)

    def planned(self) -> int:
        return len(self.replay.requests)

    def last_send_ms(self) -> float | None:
        config = self.replay.config
        if config.closed_loop or not self.replay.requests:
            return None
        return max(request.offset_ms for request in self.replay.requests) / config.speedup

    def digest_share(self) -> int:
        return self.replay.digest_share()

    def findings(self) -> dict[str, int]:
        replay = self.replay
        replay.fidelity.substituted_blocks = replay.substitution.substituted_blocks
        replay.fidelity.missed_blocks = replay.substitution.missed_blocks
        text = {} if replay.text is None else replay.text.findings()
        followers = sum(link.anchor is not None for link in replay.links.values())
        return replay.fidelity.findings() | text | {FOLLOWERS: followers}


def link_requests(requests: Sequence[Captured]) -> dict[RequestId, Link]:
    """Link every request to its anchor, following recorded parent ids.

    A child that arrived before its parent had ended did not wait for it: its anchor is the next ancestor, or it is a
    root. The same holds for a child of a request that cannot be sent. A join waits for its recorded parent, the last to
    end.
    """
    by_id = {request.request_id: request for request in requests}
    return {request_id: _link(request, by_id) for request_id, request in by_id.items()}


def _link(request: Captured, by_id: Mapping[RequestId, Captured]) -> Link:
    parent_id = request.parent_id
    while parent_id is not None and parent_id in by_id:
        ancestor = by_id[parent_id]
        if ancestor.end_ms is not None and ancestor.end_ms <= request.offset_ms:
            return Link(parent_id, request.offset_ms - ancestor.end_ms)
        parent_id = ancestor.parent_id
    return ROOT
