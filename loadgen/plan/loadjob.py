"""A synthetic load as a job: picklable data for workers, and each worker's sessions as a plan of turns."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from itertools import accumulate, chain, islice
from pathlib import Path

import numpy as np

from engines.dialect import Dialect
from engines.vllm import VLLM
from loadgen.core.job import Plan, Response, Send, Shard
from loadgen.core.request import PlannedRequest, request_headers
from loadgen.core.settings import RunSettings
from loadgen.datasets.session import estimated_tokens
from loadgen.plan.config import LoadConfig
from loadgen.plan.first_prompts import ChatFirstPrompts, TokenFirstPrompts
from loadgen.plan.shapes import SessionShape
from loadgen.plan.stages import Wave, waves
from loadgen.plan.workload import Survey, Workload
from loadgen.text.prompts import Prompt, TextForm, TokenForm
from loadgen.text.targettext import NO_TARGET, TargetText, TextMaker, open_text_maker
from tracefile.hashing.blockhash import BlockHasher, keyed_id
from tracefile.hashing.branches import BranchFinder
from tracefile.hashing.hashkey import HashKey
from tracefile.records.errors import InputError
from tracefile.records.schema import Record, RequestId, SessionId

BUSY = 0.6
"""Utilization in stage ``mix``, from the latency of single sessions: requests batch but do not queue."""
NEARLY_AT_ONCE = 0.02
"""Gap in other waves, as a share of a single session's time: requests overlap but do not arrive at once."""
PAUSE_MS = 100.0
"""Between waves, so that the engine is idle."""
NOT_IN_NAME = frozenset(setting.name for setting in fields(RunSettings)) - {"tokenizer", "fields", "vocabulary"} | {
    *("dataset_path", "nonce")
}
"""Settings that do not change the load, or that its name contains otherwise."""
NAME_BYTES = 6
ESTIMATED_LENGTHS = "estimated_lengths"
"""Finding that counts workers with estimated token counts of a dataset's texts."""


@dataclass(slots=True, kw_only=True)
class Conversations:
    """Data shared by all sessions of a worker: workload, first prompts, block hasher."""

    workload: Workload
    model: str
    first_prompts: TokenFirstPrompts | ChatFirstPrompts
    hasher: BlockHasher
    key: HashKey
    load_id: str
    """Part of every id, so that only runs of equal loads have equal request ids."""
    width: int | None
    """Limit of open sessions of the worker; null: no limit."""
    branches: BranchFinder | None = None
    """Null: records name only the block where hash chains diverge."""

    def plan(self) -> Iterator[Send]:
        """Yield the first turn of each session; with ``width``, only that many, each followed by a session."""
        sessions = self.first_prompts.draw_ahead(iter(self.workload))
        for started, session in enumerate(sessions, start=1):
            yield self.root(session, sessions if self.width else iter(()))
            if started == self.width:
                return

    def root(self, session: SessionShape, queue: Iterator[SessionShape]) -> Send:
        """First send of a session. ``queue``: sessions that wait for the end of another."""
        first = Turn(self, session, 0, None, partial(self.next_session, queue))
        if session.due_ms is not None:
            return first.open(session.due_ms)
        # Without a width, each send waits for a free slot, which may come after the end of the run.
        return first.open(0.0 if self.width else None, until_ms=self.ends_ms)

    def session_name(self, index: int) -> str:
        return f"{self.load_id}-{index}"

    def request_id(self, session: int, turn: int) -> RequestId:
        """Request id, as a tap with the same key file records it."""
        return RequestId(keyed_id(self.key, "request", f"{self.session_name(session)}-{turn + 1}"))

    def next_session(self, queue: Iterator[SessionShape], response: Response) -> Sequence[Send]:
        """Session that starts when another has ended, in a closed loop."""
        if self.ends_ms is not None and response.end_ms >= self.ends_ms:
            return []
        session = next(queue, None)
        return [] if session is None else [self.root(session, queue)]

    @property
    def ends_ms(self) -> float | None:
        ends_s = self.workload.config.ends_s
        return None if ends_s is None else ends_s * 1000


@dataclass(slots=True)
class Turn:
    """Turn of a session: planned, prompt tokens built, sent, described with block hashes."""

    load: Conversations
    session: SessionShape
    index: int
    parent_id: RequestId | None
    over: Callable[[Response], Sequence[Send]]
    prompt: Prompt | None = None

    def open(self, due_ms: float | None, *, until_ms: float | None = None) -> Send:
        return self.send(due_ms, lambda: self.load.first_prompts(self.session), until_ms=until_ms)

    def send(self, due_ms: float | None, prompt: Callable[[], Prompt], *, until_ms: float | None = None) -> Send:
        """Planned send; ``prompt`` is called shortly before it is due."""

        def build() -> PlannedRequest:
            self.prompt = prompt()
            return self.request(self.prompt)

        return Send(due_ms, build, self.follow_ups, self.describe, until_ms)

    def request(self, prompt: Prompt) -> PlannedRequest:
        shape, config = self.session.turns[self.index], self.load.workload.config
        session_name = self.load.session_name(self.session.index)
        multi_turn = len(self.session.turns) > 1
        return PlannedRequest(
            request_id=self.load.request_id(self.session.index, self.index),
            path=prompt.path,
            headers=request_headers(
                f"{session_name}-{self.index + 1}", session_name if multi_turn else None, config.session_headers
            ),
            body=prompt.body(self.load.model, shape.output_tokens),
            model=self.load.model,
            max_tokens=shape.output_tokens,
            prompt_tokens=prompt.planned_tokens(),
            stream=config.fields.stream,
            priority=config.fields.priority,
            session_id=SessionId(keyed_id(self.load.key, "session", session_name)) if multi_turn else None,
            parent_id=self.parent_id,
            turn=self.index + 1 if multi_turn else None,
        )

    def follow_ups(self, response: Response) -> Sequence[Send]:
        """Next turn; after the last or a failed turn, the follow-ups of the session."""
        has_next = response.ok and self.index + 1 < len(self.session.turns)
        return [self.next_turn(response)] if has_next else self.over(response)

    def next_turn(self, response: Response) -> Send:
        shape = self.session.turns[self.index + 1]
        before = self.prompt
        assert before is not None  # this turn has ended
        following = Turn(self.load, self.session, self.index + 1, response.record.request_id, self.over)
        return following.send(shape.think_ms, lambda: before.after(response, shape.messages(), shape.replacement_key))

    def describe(self, response: Response) -> Record:
        prompt, self.prompt = self.prompt, None
        assert prompt is not None  # described once, after its response
        record = response.record
        if self.index == 0:
            record.think_ms = None  # it may follow the end of another session, without think time
        chain = prompt.chain(self.load.hasher, response)
        if chain is None:
            return record
        if self.load.branches is not None:
            root, name = self.load.hasher.root, record.request_id
            branch = self.load.branches.add(root, chain.blocks(), chain.computed, (), name)
            if branch is not None:
                record.branch_tokens, record.branch_hash = branch.tokens, branch.block
        record.block_hashes, record.hash_source = chain.prompt, chain.source
        if chain.output is not None:
            record.output_block_hashes, record.output_hash_source = chain.output, "engine"
        return record


@dataclass(slots=True)
class StagedPlan:
    """Sends of ``--pattern calibration``: wave after wave, each after the responses of the previous wave."""

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
        """Return the first turns of the next wave with due times from now; empty at the end of the run."""
        ends_ms = self.load.ends_ms
        self._wave = None if ends_ms is not None and now_ms >= ends_ms else next(self.waves, None)
        if self._wave is None:
            return []
        self._began_ms, self._open = now_ms + PAUSE_MS, len(self._wave.sessions)
        return [
            Turn(self.load, session, 0, None, self._over).open(PAUSE_MS + start_ms)
            for session, start_ms in zip(self._wave.sessions, self._starts_ms(self._wave), strict=True)
        ]

    def _over(self, response: Response) -> Sequence[Send]:
        assert self._wave is not None  # a session of the wave was open
        if self._wave.stage == "alone" and response.ok:
            first = self._wave.sessions[0].turns[0]
            self._alone.append((first.prompt_tokens, response.end_ms - self._began_ms))
        self._open -= 1
        return [] if self._open else self._begin(response.end_ms)

    def _starts_ms(self, wave: Wave) -> Sequence[float]:
        if wave.stage in ("alone", "rested") or not self._alone:
            return [0.0] * len(wave.sessions)
        sizes, times_ms = zip(*sorted(self._alone), strict=True)
        # Measured with two turns; more turns take proportionally longer, at most.
        longer = [max(len(session.turns) / 2, 1.0) for session in wave.sessions]
        expected_ms = longer * np.interp([session.turns[0].prompt_tokens for session in wave.sessions], sizes, times_ms)
        pace = 1 / BUSY if wave.stage == "mix" else NEARLY_AT_ONCE
        return list(accumulate(pace * float(ms) * space for ms, space in zip(expected_ms, wave.spaces, strict=True)))


def load_name(config: LoadConfig) -> str:
    """Name of a load: a digest of its flags and the dataset's bytes. Equal loads, equal names."""
    digest = hashlib.sha256()
    for setting in fields(config):
        if setting.name not in NOT_IN_NAME:
            digest.update(f"{setting.name}={getattr(config, setting.name)!r}\n".encode())
    if config.dataset_path is not None:
        digest.update(file_digest(config.dataset_path))
    return f"load-{digest.hexdigest()[: 2 * NAME_BYTES]}"


def file_digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected a dataset") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """Picklable load for one engine: settings, model, block size, tokenizer."""

    config: LoadConfig
    model: str
    load_id: str
    key: HashKey
    block_size: int
    """Tokens of a block hash in the trace."""
    branches: bool = False
    """True: records name the token where hash chains diverge."""
    engine_block_size: int = 16
    """Tokens of a KV cache block of the engine, if reported."""
    dialect: Dialect = VLLM
    target: TargetText = NO_TARGET

    def open(self, shard: Shard) -> "OpenLoad":
        return OpenLoad(self, shard)

    def hasher(self) -> BlockHasher:
        salt = self.config.fields.extra.get("cache_salt")
        cache_salt = salt if isinstance(salt, str) else None
        return BlockHasher(self.key, block_size=self.block_size, model=self.model, cache_salt=cache_salt)

    def encodes(self) -> bool:
        """True if texts are tokenized during the run: dataset texts, or outputs whose token ids the engine omits."""
        if self.config.has_texts:
            return True
        if self.config.api == "completions":
            return False
        return self.config.api != "chat" or "return_token_ids" not in self.dialect.chat_fields("", 1, stream=True)

    def first_prompts(
        self, text_maker: TextMaker, hasher: BlockHasher, branches: BranchFinder | None
    ) -> TokenFirstPrompts | ChatFirstPrompts:
        config = self.config
        if config.api == "completions":
            form = TokenForm(config.vocabulary, self.dialect, self.engine_block_size, text_maker.counts, config.fields)
            return TokenFirstPrompts(form, config.prefix_tokens, hasher, branches)
        form_of_text = TextForm(config.api, text_maker, self.dialect, self.engine_block_size, config.fields)
        return ChatFirstPrompts(form_of_text, config.prefix_tokens)


class OpenLoad:
    """Shard of a load: sessions, prompts and block hashes of one worker."""

    def __init__(self, job: LoadJob, shard: Shard) -> None:
        config, hasher = job.config, job.hasher()
        branches = BranchFinder(job.block_size) if job.branches else None
        self._text_maker = open_text_maker(job.target, encodes=job.encodes())
        tokenizer = self._text_maker.tokenizer
        count = estimated_tokens if tokenizer is None else lambda text: len(tokenizer.encode(text))
        self._estimated = int(tokenizer is None and config.has_texts and config.output_tokens is None)
        single = config.open_loop or config.single_turns
        text = "" if config.api == "completions" else job.target.fingerprint()
        self.load = Conversations(
            workload=Workload(config, shard, count, text),
            model=job.model,
            first_prompts=job.first_prompts(self._text_maker, hasher, branches),
            hasher=hasher,
            branches=branches,
            key=job.key,
            load_id=job.load_id,
            width=None if single else shard.share_of(config.parallel),
        )

    @cached_property
    def survey(self) -> Survey:
        return self.load.workload.survey()

    @cached_property
    def _sends(self) -> Iterator[Send]:
        """Plan with its first send already built: that may need a pass over the dataset."""
        config = self.load.workload.config
        staged = config.pattern == "calibration"
        sends = iter(StagedPlan(self.load, waves(config)).plan()) if staged else self.load.plan()
        return chain(list(islice(sends, 1)), sends)

    def plan(self) -> Plan:
        return self._sends

    def planned(self) -> int | None:
        assert self._sends is not None  # opened before t = 0
        return self.survey.planned

    def last_send_ms(self) -> float | None:
        return self.survey.last_send_ms

    def digest_share(self) -> int:
        return self.survey.digest_share

    def findings(self) -> dict[str, int]:
        return self._text_maker.counts.findings() | {ESTIMATED_LENGTHS: self._estimated}
