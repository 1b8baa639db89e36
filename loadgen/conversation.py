"""The synthetic load as a plan: each session's turns follow one another, closed loop; sessions arrive as drawn."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from loadgen.plan import Answer, Send
from loadgen.prompts import Prompt
from loadgen.request import PlannedRequest, request_headers
from loadgen.workload import SessionShape, Workload
from tracefile import BlockHasher, HashKey, Record, RequestId, SessionId, keyed_id


@dataclass(frozen=True, slots=True)
class Conversations:
    """What all sessions of a run have in common."""

    workload: Workload
    model: str
    open_prompt: Callable[[SessionShape], Prompt]
    hasher: BlockHasher
    key: HashKey
    load_id: str
    """Names the workload in every id, so that only runs of equal loads have equal request ids."""

    def plan(self) -> Iterator[Send]:
        """Every session's first turn; in a closed loop only as many as may run at once, each followed by another."""
        sessions = iter(self.workload)
        width = self.workload.config.parallel if self.workload.config.rate is None else None
        for started, session in enumerate(sessions, start=1):
            yield self.first_turn(session, sessions if width else iter(()))
            if started == width:
                return

    def first_turn(self, session: SessionShape, queue: Iterator[SessionShape]) -> Send:
        """A session's first turn; ``queue`` holds the sessions that wait for others to end."""
        return Turn(self, session, 0, None, queue).send(session.due_ms or 0.0, lambda: self.open_prompt(session))


@dataclass(slots=True)
class Turn:
    """One turn on its way: planned, built, answered, described."""

    load: Conversations
    session: SessionShape
    index: int
    parent_id: RequestId | None
    queue: Iterator[SessionShape]
    prompt: Prompt | None = None

    def send(self, due_ms: float, prompt: Callable[[], Prompt]) -> Send:
        """The turn as the sender takes it; ``prompt`` is called shortly before it is due."""

        def build() -> PlannedRequest:
            self.prompt = prompt()
            return self.request(self.prompt)

        return Send(due_ms, build, self.follow_ups, self.describe)

    def request(self, prompt: Prompt) -> PlannedRequest:
        """The request that says ``prompt``."""
        shape = self.session.turns[self.index]
        session_name = f"{self.load.load_id}-{self.session.index}"
        name = f"{session_name}-{self.index + 1}"
        many = len(self.session.turns) > 1
        return PlannedRequest(
            request_id=self.keyed("request", name),
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

    def keyed(self, kind: str, name: str) -> RequestId:
        """The id as a tap with the same key file would record it."""
        return RequestId(keyed_id(self.load.key, kind, name))

    def follow_ups(self, answer: Answer) -> Sequence[Send]:
        """The next turn; after the last one, or a failed one, the next session of a closed loop."""
        if answer.ok and self.index + 1 < len(self.session.turns):
            return [self.next_turn(answer)]
        duration_s = self.load.workload.config.duration_s
        if duration_s is not None and answer.end_ms >= duration_s * 1000:
            return []
        return [self.load.first_turn(following, self.queue) for following in islice(self.queue, 1)]

    def next_turn(self, answer: Answer) -> Send:
        """The turn that goes on from this one's answer."""
        shape = self.session.turns[self.index + 1]
        before = self.prompt
        assert before is not None  # this turn has been answered
        following = Turn(self.load, self.session, self.index + 1, answer.record.request_id, self.queue)
        return following.send(shape.think_ms, lambda: before.after(answer, shape))

    def describe(self, answer: Answer) -> Record:
        """The record with its block hashes."""
        prompt, self.prompt = self.prompt, None
        assert prompt is not None  # described once, after its answer
        chain = prompt.chain(self.load.hasher, answer)
        if chain is None:
            return answer.record
        return msgspec.structs.replace(
            answer.record,
            block_hashes=chain.prompt,
            output_block_hashes=chain.output,
            hash_source="engine",
        )
