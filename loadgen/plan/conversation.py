"""A load as a plan: each session's turns follow one another; sessions arrive as drawn, or as others end."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import msgspec
import numpy as np

from loadgen.core.plan import Response, Send
from loadgen.core.request import PlannedRequest, request_headers
from loadgen.plan.shapes import SessionShape
from loadgen.plan.stages import Wave
from loadgen.plan.workload import Workload
from loadgen.text.prompts import Prompt
from tracefile import BlockHasher, HashKey, Record, RequestId, SessionId, keyed_id

BUSY = 0.6
"""Engine load of stage ``mix``, by the time that its sessions take alone: requests meet but do not queue up."""
NEARLY_AT_ONCE = 0.02
"""Of what a session takes alone, between two of another wave: all are answered together, and no two arrive so."""
SETTLE_MS = 100.0
"""Between waves, for the engine to come to rest."""


@dataclass(slots=True, kw_only=True)
class Conversations:
    """Common data of all sessions of a shard."""

    workload: Workload
    model: str
    open_prompt: Callable[[SessionShape], Prompt]
    hasher: BlockHasher
    key: HashKey
    load_id: str
    """Names the workload in every id, so that only runs of equal loads have equal request ids."""
    width: int | None
    """Most of the shard's sessions open at once; null: any number."""
    over: Collection[int] = ()
    """Sessions that an earlier part of the run has brought to their end, by index."""
    not_started: int = field(default=0, init=False)
    """Sessions that had arrived but found no room before the run's time was over."""

    def plan(self) -> Iterator[Send]:
        """Yield every session's first turn; with a limit on open sessions only that many, each followed by another."""
        sessions = (session for session in self.workload if session.index not in self.over)
        for started, session in enumerate(sessions, start=1):
            yield self.root(session, sessions if self.width else iter(()))
            if started == self.width:
                return

    def root(self, session: SessionShape, queue: Iterator[SessionShape]) -> Send:
        """Return a session's first turn; ``queue`` holds the sessions that wait for others to end."""
        first = Turn(self, session, 0, None, partial(self.next_session, queue))
        if session.due_ms is not None:
            return first.open(session.due_ms)
        # Without a width each of these waits for a slot of its own, and there may be one when the time is over.
        return first.open(0.0 if self.width else None, until_ms=self.ends_ms)

    def session_name(self, index: int) -> str:
        """Name of session ``index``, of which its id is hashed."""
        return f"{self.load_id}-{index}"

    def request_id(self, session: int, turn: int) -> RequestId:
        """Return a turn's id as a tap with the same key file records it."""
        return RequestId(keyed_id(self.key, "request", f"{self.session_name(session)}-{turn + 1}"))

    def next_session(self, queue: Iterator[SessionShape], response: Response) -> Sequence[Send]:
        """Return the session that starts because another has ended, at its own time or late."""
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
        """Time after which no session starts, in ms; null: none."""
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
    """What follows the session's last response."""
    prompt: Prompt | None = None

    def open(self, due_ms: float | None, *, until_ms: float | None = None, arrived: bool = False) -> Send:
        """Return the session's first turn; ``arrived``: it follows another session but has its own due time."""
        return self.send(due_ms, lambda: self.load.open_prompt(self.session), until_ms=until_ms, arrived=arrived)

    def send(
        self,
        due_ms: float | None,
        prompt: Callable[[], Prompt],
        *,
        until_ms: float | None = None,
        arrived: bool = False,
    ) -> Send:
        """Return the turn for the sender; ``prompt`` is called shortly before it is due."""

        def build() -> PlannedRequest:
            self.prompt = prompt()
            return self.request(self.prompt)

        return Send(due_ms, build, self.follow_ups, self.describe, until_ms, arrived)

    def request(self, prompt: Prompt) -> PlannedRequest:
        shape = self.session.turns[self.index]
        session_name = self.load.session_name(self.session.index)
        name = f"{session_name}-{self.index + 1}"
        many = len(self.session.turns) > 1
        return PlannedRequest(
            request_id=self.load.request_id(self.session.index, self.index),
            path=prompt.path,
            headers=request_headers(name, session_name if many else None),
            body=prompt.body(self.load.model, shape.output_tokens),
            model=self.load.model,
            max_tokens=shape.output_tokens,
            prompt_tokens=prompt.planned_tokens(),
            session_id=SessionId(keyed_id(self.load.key, "session", session_name)) if many else None,
            parent_id=self.parent_id,
            turn=self.index + 1 if many else None,
        )

    def follow_ups(self, response: Response) -> Sequence[Send]:
        """Return the next turn; after the last or a failed turn, the follow-ups of the session."""
        if response.ok and self.index + 1 < len(self.session.turns):
            return [self.next_turn(response)]
        return self.over(response)

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
        if self.index == 0:  # it may follow another session's end, but thinks of nothing
            record = msgspec.structs.replace(record, think_ms=None)
        chain = prompt.chain(self.load.hasher, response)
        if chain is None:
            return record
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
    """Sessions of the wave that are not over."""
    _alone: list[tuple[int, float]] = field(default_factory=list, init=False)
    """Of each session that was answered with nothing beside it: its first prompt's tokens, and how long it took."""

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
        """Count the end of a session, and begin the next wave after the last one."""
        assert self._wave is not None  # some session of it was open
        if self._wave.stage == "alone" and response.ok:
            first = self._wave.sessions[0].turns[0]
            self._alone.append((first.prompt_tokens, response.end_ms - self._began_ms))
        self._open -= 1
        return [] if self._open else self._begin(response.end_ms)

    def _starts_ms(self, wave: Wave) -> Sequence[float]:
        """Return each session's start, from the wave's beginning."""
        if wave.stage == "alone" or not self._alone:
            return [0.0] * len(wave.sessions)
        sizes, took_ms = zip(*sorted(self._alone), strict=True)
        # Those took two turns; more take as much longer, at most.
        longer = [max(len(session.turns) / 2, 1.0) for session in wave.sessions]
        expected_ms = longer * np.interp([session.turns[0].prompt_tokens for session in wave.sessions], sizes, took_ms)
        pace = 1 / BUSY if wave.stage == "mix" else NEARLY_AT_ONCE
        return list(accumulate(pace * float(ms) * space for ms, space in zip(expected_ms, wave.spaces, strict=True)))
