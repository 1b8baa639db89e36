"""A plan carried out without a clock: an event queue in which a request takes as long as a test says.

Requests go nowhere, or, with ``posted``, over HTTP to an engine, one after another.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import httpx
import msgspec

from loadgen.core.job import Plan, Response, Send
from loadgen.core.request import PlannedRequest
from tracefile.records.schema import Record, Status
from wire.answer import parse_answer
from wire.completion import Completion


@dataclass(frozen=True)
class Outcome:
    """What becomes of one request."""

    took_ms: float = 1.0
    status: Status = "ok"
    error: str | None = None
    completion: Completion | None = None
    """What an engine answered; null: nobody was asked."""


@dataclass
class Played:
    """What a plan did."""

    sent: list[PlannedRequest] = field(default_factory=list)
    started_ms: dict[str, float] = field(default_factory=dict)
    ended_ms: dict[str, float] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    most_in_flight: int = 0

    @property
    def ids(self) -> list[str]:
        return [request.request_id for request in self.sent]


Outcomes = Callable[[PlannedRequest], Outcome]
Generator = Callable[[PlannedRequest], list[int]]


class Player:
    """The event queue: ends before starts at one time, roots one at a time as the sender takes them."""

    def __init__(self, plan: Plan, outcome: Outcomes, generated: Generator, parallel: int | None) -> None:
        self.played = Played()
        self._roots = iter(plan)
        self._outcome = outcome
        self._generated = generated
        self._parallel = parallel
        self._numbers = count()
        self._in_flight = 0
        self._held: deque[Send] = deque()
        self._queue: list[tuple[float, int, int, Callable[[float], None]]] = []

    def run(self) -> Played:
        self._next_root(0.0)
        while self._queue:
            now_ms, _, _, what = heapq.heappop(self._queue)
            what(now_ms)
        assert not self._held
        return self.played

    def _push(self, at_ms: float, rank: int, what: Callable[[float], None]) -> None:
        heapq.heappush(self._queue, (at_ms, rank, next(self._numbers), what))

    def _next_root(self, now_ms: float) -> None:
        root = next(self._roots, None)
        if root is not None:
            self._push(now_ms if root.due_ms is None else root.due_ms, 1, partial(self._start_root, root))

    def _start_root(self, root: Send, now_ms: float) -> None:
        if root.due_ms is None and self._parallel is not None and self._in_flight >= self._parallel:
            self._held.append(root)
            return
        self._start(root, now_ms)
        self._next_root(now_ms)

    def _start(self, send: Send, now_ms: float) -> None:
        request, played = send.build(), self.played
        self._in_flight += 1
        played.most_in_flight = max(played.most_in_flight, self._in_flight)
        played.sent.append(request)
        played.started_ms[request.request_id] = now_ms
        became = self._outcome(request)
        self._push(now_ms + became.took_ms, 0, partial(self._end, send, request, became))

    def _end(self, send: Send, request: PlannedRequest, became: Outcome, now_ms: float) -> None:
        self._in_flight -= 1
        self.played.ended_ms[request.request_id] = now_ms
        completion = became.completion
        record = Record(
            request_id=request.request_id,
            session_id=request.session_id,
            parent_id=request.parent_id,
            arrival_ms=now_ms - became.took_ms,
            e2e_ms=became.took_ms,
            status=became.status,
            error=became.error,
            prompt_tokens=completion.prompt_tokens if completion else request.prompt_tokens,
            output_tokens=completion.output_tokens if completion else request.max_tokens * (request.n or 1),
            cached_tokens=completion.cached_tokens if completion else None,
        )
        token_ids = None if became.status != "ok" else completion.token_ids if completion else self._generated(request)
        answer = Response(record, now_ms, token_ids, None, "")
        for following in send.then(answer):
            self._push(now_ms + (following.due_ms or 0.0), 1, partial(self._start, following))
        self.played.records.append(send.describe(answer))
        if self._held:
            self._start_root(self._held.popleft(), now_ms)


def play(
    plan: Plan,
    outcome: Outcomes = lambda request: Outcome(),
    generated: Generator = lambda request: list(range(500, 500 + request.max_tokens)),
    parallel: int | None = None,
) -> Played:
    """Carry the plan out to its end; ``parallel`` holds back sends that are due as soon as there is room."""
    return Player(plan, outcome, generated, parallel).run()


def posted(url: str) -> Outcomes:
    """Every request posted as the sender would, its answer read as the sender's are."""

    def post(request: PlannedRequest) -> Outcome:
        headers = {name.decode(): value.decode() for name, value in request.headers}
        response = httpx.post(url + request.path, content=request.body, headers=headers, trust_env=False)
        if not response.is_success:
            return Outcome(status="error", error=f"http_{response.status_code}")
        completion = parse_answer(request.path, [(1, response.content)], stream=request.stream)
        assert completion.done
        assert completion.error_kind is None
        return Outcome(completion=completion)

    return post


def body(request: PlannedRequest) -> dict[str, object]:
    """The request's JSON."""
    body: dict[str, object] = msgspec.json.decode(request.body)
    return body
