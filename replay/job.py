"""A replay as a job: data for its shards, and each shard's requests planned, built with their tokens, described."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np

from engines.dialect import DialectName
from engines.recognition import DIALECTS
from loadgen.core.bodies import completions_body
from loadgen.core.draws import TokenIds
from loadgen.core.job import Shard
from loadgen.core.plan import Plan, Response, Send
from loadgen.core.request import PlannedRequest, request_headers
from loadgen.text.prompts import ChatPrompt
from replay.capture import Captured, load_requests, read_branches
from replay.config import ReplayConfig
from replay.rounds import Replay, Round, link_requests, make_replay
from replay.survey import Survey
from replay.text import Exchange, TextTarget, goes_on, open_text
from tracefile import BlockHash, Record, RequestId


@dataclass(slots=True)
class Slot:
    """Place in a closed loop, held by a session until all its requests have ended."""

    waiting: "Iterator[Replayed]"
    open: int = 1

    def ended(self, followers: int) -> Sequence[Send]:
        """Count an ended request with ``followers`` follow-ups; return the next root if the slot is free."""
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
    """Request of one round."""

    round: Round
    captured: Captured
    slot: Slot | None = None
    before: Exchange | None = None
    prompt: TokenIds | None = None
    chat: ChatPrompt | None = None
    output_hashes: list[BlockHash] | None = None

    def due_ms(self) -> float:
        run = self.round.run
        return (self.captured.offset_ms + self.round.number * run.period_ms) / run.config.speedup

    def send(self, due_ms: float | None) -> Send:
        """``due_ms`` null: as soon as there is room."""
        return Send(due_ms, self.build, self.follow_ups, self.describe)

    def build(self) -> PlannedRequest:
        captured, run = self.captured, self.round.run
        blocks = self.round.blocks(captured).ravel()
        tail = self.round.tail(captured, captured.prompt_tokens - len(blocks))
        self.prompt = np.concatenate([blocks, tail])
        choices = captured.n or 1
        per_choice = -(-captured.output_tokens // choices)
        shape = self._model() | run.dialect.shape_fields(
            n=captured.n, priority=captured.priority, prompt_logprobs=captured.prompt_logprobs
        )
        request_id, session_id = self.round.request_id(captured.request_id), self.round.session_id(captured.session_id)
        path, body = self._body(self.prompt, per_choice, shape)
        return PlannedRequest(
            request_id=request_id,
            path=path,
            headers=request_headers(request_id, session_id, run.config.session_headers),
            body=body,
            model=str(shape["model"]),
            max_tokens=per_choice,
            prompt_tokens=captured.prompt_tokens,
            stream=captured.stream,
            session_id=session_id,
            parent_id=None if captured.parent_id is None else self.round.request_id(captured.parent_id),
            turn=captured.turn,
            n=captured.n,
            priority=captured.priority if run.config.fields.priority is None else run.config.fields.priority,
        )

    def follow_ups(self, response: Response) -> Sequence[Send]:
        """Requests that waited for this one (none after a failure), and the next root of its slot."""
        run, captured = self.round.run, self.captured
        self.round.ends_ms[captured.request_id] = response.end_ms
        exchange = self._exchange(response)
        self._substitute(response)
        followers: list[Send] = []
        if response.ok:
            waited = run.followers.get(captured.request_id, ())
            followers = [Replayed(self.round, each, self.slot, exchange).send(run.think_ms(each)) for each in waited]
        else:
            behind = sum(1 for _ in run.behind(captured))
            run.fidelity.leave(behind, response.record.error or response.record.status)
        return followers if self.slot is None else [*followers, *self.slot.ended(len(followers))]

    def describe(self, response: Response) -> Record:
        """Record with the capture's ids and hashes, as far as they match the request."""
        captured = self.captured
        self.prompt = self.chat = None
        self._count(response)
        hashes = self.round.hashes(captured)
        parent_end_ms = None if captured.parent_id is None else self.round.ends_ms.get(captured.parent_id)
        arrival_ms = response.record.arrival_ms
        return msgspec.structs.replace(
            response.record,
            session_source=captured.session_source,
            lora=captured.lora,
            prompt_logprobs=(captured.prompt_logprobs and bool(self.round.run.dialect.prompt_logprobs)) or None,
            block_hashes=hashes,
            output_block_hashes=self.output_hashes,
            hash_source=captured.hash_source if hashes is not None else None,
            think_ms=None if parent_end_ms is None or arrival_ms is None else round(arrival_ms - parent_end_ms, 3),
        )

    def _model(self) -> dict[str, object]:
        run, lora = self.round.run, self.captured.lora
        adapter = "" if lora is None else run.config.loras.get(lora, lora)
        return run.dialect.lora(run.model, adapter) if adapter else {"model": run.model}

    def _body(self, prompt: TokenIds, tokens: int, shape: Mapping[str, object]) -> tuple[str, bytes]:
        run, stream = self.round.run, self.captured.stream
        if run.text is None or run.text.form_of(self.captured) is None:
            extra = {**shape, **run.config.fields.patch("completions")}
            body = completions_body(run.model, prompt, tokens, stream=stream, extra=extra, dialect=run.dialect)
            return run.dialect.path, body
        self.chat = run.text.prompt(self.captured, prompt, self.before)
        return self.chat.path, run.text.body(
            self.chat, run.model, tokens, stream=stream, shape=shape, fields=run.config.fields
        )

    def _exchange(self, response: Response) -> Exchange | None:
        """Exchange for prompts that continue this output; null: none may."""
        config = self.round.run.config
        if self.chat is None:
            return None
        self.chat.settle(response)
        goes_on_from_it = config.output_substitution and not config.cold_prompts and response.ok
        return Exchange(self.captured, self.chat, response) if goes_on_from_it else None

    def _substitute(self, response: Response) -> None:
        """Use the real output tokens in later prompts; set the output hashes valid in this run."""
        captured, recorded = self.captured, self.captured.output_hashes
        if not response.ok or response.token_ids is None or recorded is None or self.prompt is None:
            return
        if self.chat is not None:
            # Only requests that waited for this output continue it; others that carry its hashes have words there.
            waiting = self.round.run.followers.get(captured.request_id, ())
            if not captured.as_long(response.record):
                return
            if self.round.run.config.output_substitution and any(goes_on(each, captured) for each in waiting):
                self.output_hashes = self.round.own(recorded)
                return
        if self.chat is not None or self.round.run.config.cold_prompts:
            self.output_hashes = [self.round.expansion.rekeyed(each, captured.request_id) for each in recorded]
            return
        true = self.round.substitution.answered(
            captured.request_id, recorded, self.prompt, response.token_ids, captured.tail
        )
        self.output_hashes = self.round.own(true)

    def _count(self, response: Response) -> None:
        fidelity = self.round.run.fidelity
        fidelity.add(self.captured, response.record)
        in_ids = self.round.words_for(self.captured) is None
        fidelity.without_ids += (
            in_ids and response.ok and response.token_ids is None and bool(self.captured.output_hashes)
        )


def plan_sends(replay: Replay) -> Iterator[Send]:
    """Yield the roots in order of time, in a closed loop in recorded order; other requests follow from them."""
    roots = roots_of(replay)
    if replay.width is None:
        for root in roots:
            yield root.send(None if replay.config.closed_loop else root.due_ms())
        return
    for root in islice(roots, replay.width):
        root.slot = Slot(roots)
        yield root.send(0.0)


def roots_of(replay: Replay) -> Iterator[Replayed]:
    for number in range(replay.config.repeat):
        for captured in replay.requests:
            if replay.link(captured).anchor is None and (number, captured.request_id) not in replay.over:
                yield Replayed(replay.round(number), captured)


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """A replay that any process can open: the requests themselves are read there."""

    config: ReplayConfig
    survey: Survey
    model: str
    dialect: DialectName
    text: TextTarget | None = None
    """Null: token ids are sent."""

    def open(self, shard: Shard) -> "OpenReplay":
        config = self.config
        requests = load_requests(
            self.survey,
            config.selection,
            shard=shard,
            sessions=config.replay_sessions,
            output_substitution=config.output_substitution and not config.cold_prompts,
        )
        replay = make_replay(
            config,
            self.model,
            requests,
            link_requests(requests) if config.replay_sessions else {},
            self.survey.block_size,
            dialect=DIALECTS[self.dialect],
            width=slots_of(config, shard),
            period_ms=self.survey.span_ms,
            branches=read_branches(self.survey) if self.text is None else None,
            text=None if self.text is None else open_text(self.text, DIALECTS[self.dialect], self.survey.block_size),
        )
        return OpenReplay(replay)


@dataclass(slots=True)
class OpenReplay:
    """A shard's part of a replay, ready to be sent."""

    replay: Replay
    _left: int | None = None
    """Requests left after resumption; null: all."""

    def plan(self) -> Plan:
        return plan_sends(self.replay)

    def planned(self) -> int:
        whole = len(self.replay.requests) * self.replay.config.repeat
        return whole if self._left is None else self._left

    def last_send_ms(self) -> float | None:
        config = self.replay.config
        if config.closed_loop or not self.replay.requests:
            return None
        last_ms = max(request.offset_ms for request in self.replay.requests)
        return (last_ms + (config.repeat - 1) * self.replay.period_ms) / config.speedup

    def digest_share(self) -> int:
        return self.replay.digest_share()

    def resume(self, ended: Mapping[RequestId, bool]) -> Collection[RequestId]:
        """Omit roots that ended with all their followers, up to the first failure."""
        replay = self.replay
        kept: set[RequestId] = set()
        gone = 0
        for root in list(roots_of(replay)):
            sent = sent_to_the_end(replay, root, ended)
            if not sent:
                continue
            replay.over.add((root.round.number, root.captured.request_id))
            kept.update(sent)
            tree = 1 + sum(1 for _ in replay.behind(root.captured))
            replay.fidelity.leave(tree - len(sent), "a failure in the earlier run")
            gone += tree
        self._left = self.planned() - gone
        return kept

    def findings(self) -> dict[str, int]:
        fidelity = self.replay.fidelity
        fidelity.substituted_blocks = sum(each.substitution.substituted_blocks for each in self.replay.rounds.values())
        fidelity.missed_blocks = sum(each.substitution.missed_blocks for each in self.replay.rounds.values())
        links = self.replay.links.values()
        text = {} if self.replay.text is None else self.replay.text.findings()
        return fidelity.findings() | text | {FOLLOWERS: sum(link.anchor is not None for link in links)}


FOLLOWERS = "followers"
"""Finding that counts requests that waited for another."""


def slots_of(config: ReplayConfig, shard: Shard) -> int | None:
    """Open sessions of a shard in a closed loop of sessions; null: another mode."""
    if not config.closed_loop or not config.replay_sessions or config.parallel is None:
        return None
    return len(range(shard.index, config.parallel, shard.count))


def sent_to_the_end(replay: Replay, root: Replayed, ended: Mapping[RequestId, bool]) -> list[RequestId]:
    """Requests of a root's tree if all were sent; else none."""
    sent: list[RequestId] = []
    waiting = [root.captured]
    while waiting:
        captured = waiting.pop()
        request_id = root.round.request_id(captured.request_id)
        well = ended.get(request_id)
        if well is None:
            return []
        sent.append(request_id)
        if well:
            waiting += replay.followers.get(captured.request_id, ())
    return sent
