"""A synthetic load as a job: data for its shards, and each shard's sessions as a plan of turns."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from itertools import accumulate, chain, islice
from pathlib import Path

import msgspec
import numpy as np

from engines.dialect import Dialect
from engines.vllm import VLLM
from loadgen.core.job import Shard
from loadgen.core.plan import Plan, Response, Send
from loadgen.core.request import PlannedRequest, request_headers
from loadgen.datasets import DATASETS
from loadgen.datasets.session import ESTIMATED, TokenizerLengths
from loadgen.plan.config import LoadConfig
from loadgen.plan.opening import ChatOpening, TokenOpening
from loadgen.plan.shapes import SessionShape
from loadgen.plan.stages import Wave, waves
from loadgen.plan.workload import Survey, Workload
from loadgen.text.prompts import Prompt, TextForm, TokenForm
from loadgen.text.targettext import NO_TARGET, TargetText, TextMaker, open_text_maker
from tracefile import BlockHasher, HashKey, InputError, Record, RequestId, SessionId, keyed_id
from tracefile.hashing.branches import BranchFinder

BUSY = 0.6
"""Utilization in stage ``mix``, by the time of sessions alone: requests meet but do not queue up."""
NEARLY_AT_ONCE = 0.02
"""Gap in other waves, as a share of a session's time alone: requests overlap but do not arrive at once."""
SETTLE_MS = 100.0
"""Between waves, so that the engine is idle."""


@dataclass(slots=True, kw_only=True)
class Conversations:
    """Common data of all sessions of a shard."""

    workload: Workload
    model: str
    open_prompt: Callable[[SessionShape], Prompt]
    hasher: BlockHasher
    key: HashKey
    load_id: str
    """Part of every id, so that only runs of equal loads have equal request ids."""
    width: int | None
    """Most open sessions of the shard; null: any number."""
    branches: BranchFinder | None = None
    """Null: records tell to the block only where their chains part."""
    over: Collection[int] = ()
    """Indices of sessions that an earlier part of the run has ended."""
    not_started: int = field(default=0, init=False)
    """Sessions without room before the run's time was over."""
    turns_to_come: int = field(default=0, init=False)
    """Later turns that were planned and have not ended."""
    queue: Iterator[SessionShape] = field(default=iter(()), init=False)
    """Sessions that wait for room."""

    def plan(self) -> Iterator[Send]:
        """Yield every session's first turn; with a limit on open sessions only that many, each followed by another."""
        self.queue = sessions = (session for session in self.workload if session.index not in self.over)
        for started, session in enumerate(sessions, start=1):
            yield self.root(session, sessions if self.width else iter(()))
            if started == self.width:
                return

    def root(self, session: SessionShape, queue: Iterator[SessionShape]) -> Send:
        """``queue``: sessions that wait for others to end."""
        first = Turn(self, session, 0, None, partial(self.next_session, queue))
        if session.due_ms is not None:
            return first.open(session.due_ms)
        # Without a width each of these waits for a slot of its own, and there may be one when the time is over.
        return first.open(0.0 if self.width else None, until_ms=self.ends_ms)

    def session_name(self, index: int) -> str:
        return f"{self.load_id}-{index}"

    def request_id(self, session: int, turn: int) -> RequestId:
        """Request id, as a tap with the same key file records it."""
        return RequestId(keyed_id(self.key, "request", f"{self.session_name(session)}-{turn + 1}"))

    def next_session(self, queue: Iterator[SessionShape], response: Response) -> Sequence[Send]:
        """The session that starts after another, at its own time or late."""
        if self.ends_ms is not None and response.end_ms >= self.ends_ms:
            if self.open_loop:
                self.not_started += sum(1 for _ in queue)
            return []
        session = next(queue, None)
        if session is None:
            return []
        first = Turn(self, session, 0, None, partial(self.next_session, queue))
        return [first.open(session.due_ms or 0.0, arrived=self.open_loop)]

    @property
    def open_loop(self) -> bool:
        return self.workload.config.open_loop

    @property
    def ends_ms(self) -> float | None:
        ends_s = self.workload.config.ends_s
        return None if ends_s is None else ends_s * 1000


@dataclass(slots=True)
class Turn:
    """Turn of a session: planned, built, sent, described."""

    load: Conversations
    session: SessionShape
    index: int
    parent_id: RequestId | None
    over: Callable[[Response], Sequence[Send]]
    prompt: Prompt | None = None

    def open(self, due_ms: float | None, *, until_ms: float | None = None, arrived: bool = False) -> Send:
        """``arrived``: it follows another session but has its own due time."""
        return self.send(due_ms, lambda: self.load.open_prompt(self.session), until_ms=until_ms, arrived=arrived)

    def send(
        self,
        due_ms: float | None,
        prompt: Callable[[], Prompt],
        *,
        until_ms: float | None = None,
        arrived: bool = False,
    ) -> Send:
        """``prompt`` is called shortly before it is due."""

        def build() -> PlannedRequest:
            self.prompt = prompt()
            return self.request(self.prompt)

        return Send(due_ms, build, self.follow_ups, self.describe, until_ms, arrived)

    def request(self, prompt: Prompt) -> PlannedRequest:
        shape = self.session.turns[self.index]
        session_name = self.load.session_name(self.session.index)
        name = f"{session_name}-{self.index + 1}"
        many = len(self.session.turns) > 1
        fields = self.load.workload.config.fields
        return PlannedRequest(
            request_id=self.load.request_id(self.session.index, self.index),
            path=prompt.path,
            headers=request_headers(name, session_name if many else None, self.load.workload.config.session_headers),
            body=prompt.body(self.load.model, shape.output_tokens),
            model=self.load.model,
            max_tokens=shape.output_tokens,
            prompt_tokens=prompt.planned_tokens(),
            stream=fields.stream,
            priority=fields.priority,
            session_id=SessionId(keyed_id(self.load.key, "session", session_name)) if many else None,
            parent_id=self.parent_id,
            turn=self.index + 1 if many else None,
        )

    def follow_ups(self, response: Response) -> Sequence[Send]:
        """The next turn; after the last or a failed turn, the follow-ups of the session."""
        return [self.next_turn(response)] if self._goes_on(response) else self.over(response)

    def _goes_on(self, response: Response) -> bool:
        return response.ok and self.index + 1 < len(self.session.turns)

    def next_turn(self, response: Response) -> Send:
        shape = self.session.turns[self.index + 1]
        before = self.prompt
        assert before is not None  # this turn has been answered
        following = Turn(self.load, self.session, self.index + 1, response.record.request_id, self.over)
        return following.send(shape.think_ms, lambda: before.after(response, shape.messages(), shape.stand_in_key))

    def describe(self, response: Response) -> Record:
        prompt, self.prompt = self.prompt, None
        assert prompt is not None  # described once, after its answer
        record = response.record
        # Here, as turns that end while the run does have no follow-ups.
        self.load.turns_to_come += self._goes_on(response) - (self.index > 0)
        if self.index == 0:  # it may follow another session's end, but thinks of nothing
            record = msgspec.structs.replace(record, think_ms=None)
        chain = prompt.chain(self.load.hasher, response)
        if chain is None:
            return record
        if self.load.branches is not None:
            root, name = self.load.hasher.root, record.request_id
            branch = self.load.branches.add(root, chain.whole(), chain.computed, (), name)
            if branch is not None:
                record = msgspec.structs.replace(record, branch_tokens=branch.tokens, branch_hash=branch.block)
        return msgspec.structs.replace(
            record,
            block_hashes=chain.prompt,
            output_block_hashes=chain.output,
            hash_source=chain.source,
            output_hash_source=None if chain.output is None else "engine",
        )


@dataclass(slots=True)
class StagedPlan:
    """Begins the waves one after another; ``plan`` is the first one, and what follows comes of its answers."""

    load: Conversations
    waves: Iterator[Wave]
    _wave: Wave | None = field(default=None, init=False)
    _began_ms: float = field(default=0.0, init=False)
    _open: int = field(default=0, init=False)
    _alone: list[tuple[int, float]] = field(default_factory=list, init=False)
    """Prompt tokens and ms of each session that ran alone."""

    def plan(self) -> Sequence[Send]:
        return self._begin(0.0)

    def _begin(self, now_ms: float) -> Sequence[Send]:
        """Return the next wave's first turns with due times from now; empty at the end of the run."""
        ends_ms = self.load.ends_ms
        self._wave = None if ends_ms is not None and now_ms >= ends_ms else next(self.waves, None)
        if self._wave is None:
            return []
        self._began_ms, self._open = now_ms + SETTLE_MS, len(self._wave.sessions)
        return [
            Turn(self.load, session, 0, None, self._over).open(SETTLE_MS + start_ms)
            for session, start_ms in zip(self._wave.sessions, self._starts_ms(self._wave), strict=True)
        ]

    def _over(self, response: Response) -> Sequence[Send]:
        assert self._wave is not None  # some session of it was open
        if self._wave.stage == "alone" and response.ok:
            first = self._wave.sessions[0].turns[0]
            self._alone.append((first.prompt_tokens, response.end_ms - self._began_ms))
        self._open -= 1
        return [] if self._open else self._begin(response.end_ms)

    def _starts_ms(self, wave: Wave) -> Sequence[float]:
        if wave.stage in ("alone", "rested") or not self._alone:
            return [0.0] * len(wave.sessions)
        sizes, took_ms = zip(*sorted(self._alone), strict=True)
        # Those took two turns; more take as much longer, at most.
        longer = [max(len(session.turns) / 2, 1.0) for session in wave.sessions]
        expected_ms = longer * np.interp([session.turns[0].prompt_tokens for session in wave.sessions], sizes, took_ms)
        pace = 1 / BUSY if wave.stage == "mix" else NEARLY_AT_ONCE
        return list(accumulate(pace * float(ms) * space for ms, space in zip(expected_ms, wave.spaces, strict=True)))


ELSEWHERE = frozenset(
    {"url", "trace", "model", "timeout_s", "overwrite", "as_json", "run", "dataset_path", "dialect"}
    | {"session_headers", "at_end", "nonce"}
)
NAME_BYTES = 6
NOT_STARTED = "sessions_not_started"
PAUSED = "sessions_in_a_pause"
"""Finding that counts sessions whose next turn was to come when the run ended."""
ESTIMATED_LENGTHS = "estimated_lengths"
"""Finding that counts shards without exact lengths of a dataset's texts."""
FAR_ENOUGH = 10_000
"""After so many unknown sessions in a row, none of the later ones was begun."""


def load_name(config: LoadConfig) -> str:
    """Name by which equal loads are known: a digest of flags and the dataset's bytes."""
    digest = hashlib.sha256()
    for each in fields(config):
        if each.name not in ELSEWHERE:
            digest.update(f"{each.name}={getattr(config, each.name)!r}\n".encode())
    if config.dataset_path is not None:
        digest.update(file_digest(config.dataset_path))
    return f"load-{digest.hexdigest()[: 2 * NAME_BYTES]}"


def file_digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected a dataset") from None


def shard_of_cap(cap: int | None, shard: Shard) -> int | None:
    if cap is None:
        return None
    part = cap // shard.count + (shard.index < cap % shard.count)
    if part == 0:
        raise InputError(f"--procs: {shard.count} with at most {cap} at once; expected at most {cap} processes")
    return part


def needs_lengths(config: LoadConfig) -> bool:
    """True if output lengths or cut turns need lengths of the dataset's texts."""
    if config.dataset_path is None or not DATASETS[config.dataset].has_texts:
        return False
    return config.output_tokens is None or DATASETS[config.dataset].cuts_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """A load for one engine."""

    config: LoadConfig
    model: str
    load_id: str
    key: HashKey
    block_size: int
    """Of the trace's hashes."""
    branches: bool = False
    """Records tell to the token where their chains part."""
    engine_block_size: int = 16
    """Of the engine's cache, if it tells."""
    dialect: Dialect = VLLM
    target: TargetText = NO_TARGET

    def open(self, shard: Shard) -> "OpenLoad":
        return OpenLoad(self, shard)

    def hasher(self) -> BlockHasher:
        salt = self.config.fields.extra.get("cache_salt")
        cache_salt = salt if isinstance(salt, str) else None
        return BlockHasher(self.key, block_size=self.block_size, model=self.model, cache_salt=cache_salt)

    def encodes(self) -> bool:
        """True if texts must be encoded during the run: a dataset's, or outputs whose ids the engine omits."""
        if self.config.dataset_path is not None and DATASETS[self.config.dataset].has_texts:
            return True
        if self.config.api == "completions":
            return self.config.chat_template and not self.dialect.returns_ids
        return self.config.api != "chat" or "return_token_ids" not in self.dialect.chat_fields("", 1, stream=True)

    def text(self) -> str:
        """Fingerprint of the words in the requests; empty: token ids are sent."""
        if self.config.sends_ids:
            return ""
        return self.target.fingerprint(rendered=self.config.chat_template)

    def opening(
        self, text_maker: TextMaker, hasher: BlockHasher, branches: BranchFinder | None
    ) -> Callable[[SessionShape], Prompt]:
        config = self.config
        if config.sends_ids:
            form = TokenForm(
                config.vocabulary,
                self.dialect,
                self.engine_block_size,
                text_maker,
                text_maker.truth,
                config.fields,
            )
            return TokenOpening(form, config.prefix_tokens, hasher, branches)
        api = "chat" if config.api == "completions" else config.api
        form_of_text = TextForm(
            api, text_maker, self.dialect, self.engine_block_size, config.chat_template, config.fields
        )
        return ChatOpening(form_of_text, config.prefix_tokens)


class OpenLoad:
    """Part of a load that one shard sends."""

    def __init__(self, job: LoadJob, shard: Shard) -> None:
        config, hasher = job.config, job.hasher()
        branches = BranchFinder(job.block_size) if job.branches else None
        self._text_maker = open_text_maker(job.target, encodes=job.encodes())
        tokenizer = self._text_maker.tokenizer
        lengths = ESTIMATED if tokenizer is None else TokenizerLengths(tokenizer)
        self._sends: Iterator[Send] | None = None
        self._over = 0
        self._estimated = int(tokenizer is None and needs_lengths(config))
        alone = not config.open_loop and config.single_turns and config.parallel_sessions is None
        width = None if alone else shard_of_cap(config.sessions_at_once, shard)
        self.load = Conversations(
            workload=Workload(config, shard, lengths, job.text()),
            model=job.model,
            open_prompt=job.opening(self._text_maker, hasher, branches),
            hasher=hasher,
            branches=branches,
            key=job.key,
            load_id=job.load_id,
            width=width,
        )

    @cached_property
    def survey(self) -> Survey:
        return self.load.workload.survey()

    def plan(self) -> Plan:
        return self._ahead()

    def planned(self) -> int | None:
        self._ahead()
        planned = self.survey.planned
        return None if planned is None else planned - self._over

    def last_send_ms(self) -> float | None:
        return self.survey.last_send_ms

    def _ahead(self) -> Iterator[Send]:
        """The plan with its first send already made: it may need the whole dataset."""
        if self._sends is None:
            config = self.load.workload.config
            staged = config.pattern == "calibration"
            sends = iter(StagedPlan(self.load, waves(config)).plan()) if staged else self.load.plan()
            self._sends = chain(list(islice(sends, 1)), sends)
        return self._sends

    def digest_share(self) -> int:
        return self.survey.digest_share

    def resume(self, ended: Mapping[RequestId, bool]) -> Collection[RequestId]:
        """Leave out sessions that have ended; return their requests."""
        over: dict[int, list[RequestId]] = {}
        for session, requests in self._begun(ended):
            whole = len(requests) == len(session.turns)
            if whole or not ended[requests[-1]]:
                over[session.index] = requests
                self._over += len(session.turns)
        self.load.over = over.keys()
        self._sends = None
        return [request for requests in over.values() for request in requests]

    def _begun(self, ended: Mapping[RequestId, bool]) -> Iterator[tuple[SessionShape, list[RequestId]]]:
        """Yield sessions that have known requests, with these requests; sessions began in order of their numbers."""
        unknown = 0
        for session in self.load.workload:
            ids = (self.load.request_id(session.index, turn) for turn in range(len(session.turns)))
            if known := [request for request in ids if request in ended]:
                unknown = 0
                yield session, known
            elif (unknown := unknown + 1) > FAR_ENOUGH:
                return

    def findings(self) -> dict[str, int]:
        load, config = self.load, self.load.workload.config
        if config.at_end == "cancel" and config.open_loop and load.width:
            load.not_started += sum(1 for _ in load.queue)
        counts = {NOT_STARTED: load.not_started, PAUSED: load.turns_to_come, ESTIMATED_LENGTHS: self._estimated}
        return self._text_maker.truth.findings() | counts
