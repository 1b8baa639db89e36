"""Run of a plan: requests built ahead of need and handed to the sender; responses read, followed up and recorded."""

import asyncio
import hashlib
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engines.dialect import decoded
from loadgen.core.plan import Plan, Response
from loadgen.core.request import Headers, PlannedRequest, RequestWriter
from loadgen.sending.crossing import Batch, Ended, Halted, Order, Pulse
from loadgen.sending.lookahead import Clocks, Lookahead, Planned
from measure.tally import Tally
from tracefile import Record
from tracefile.hashing.blockhash import MAX_TOKEN
from tracefile.records.schema import Status, TokensSource
from wire.alarm import Alarm, Clock
from wire.answer import parse_answer
from wire.completion import Completion
from wire.errors import LossKind
from wire.url import Origin

BUILDS_PER_TURN = 64
"""Handing over wakes the sender, a context switch where both share a core."""
BUILD_NS = 4_000_000
"""Longest time of building in a turn: follow-ups may be due."""
SETTLED_PER_TURN = 8
"""Least requests settled in a turn, or as many as were built."""
LARGE_BODY_BYTES = 16 << 10

FromSender = Batch | Pulse | Halted


class SenderDiedError(RuntimeError):
    """The sender's process died."""


class SenderLink(Protocol):
    """The way to a sender."""

    def give(self, orders: list[Order]) -> None:
        """Send these at their times."""

    def halt(self, kind: LossKind | None = None) -> None:
        """Send nothing more; abort the requests in flight, with this error."""


class Given(msgspec.Struct, frozen=True):
    """A request that the sender has."""

    planned: Planned
    request: PlannedRequest
    share: int
    """Its share of the digest of sent bodies."""


class PlanRun:
    """Run of one shard's plan. ``over`` is done when everything has ended, or has the error that ended it."""

    def __init__(
        self,
        plan: Plan,
        link: SenderLink,
        write: Callable[[Record], None],
        tally: Tally,
        *,
        origin: Origin,
        access: Headers = (),
        clocks: Clocks,
        not_before_ns: int,
        ends_ns: int | None = None,
        alone: bool = True,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        """``not_before_ns``: see ``Lookahead``. ``ends_ns``: all that is left is cancelled; null: it finishes.

        ``alone``: true if no other shard sends.
        """
        self._alone = alone
        self._link, self._write, self._tally = link, write, tally
        self._writer, self._clocks, self._clock = RequestWriter(origin, access), clocks, clock
        self._lookahead = Lookahead(plan, clocks.t0_ns, not_before_ns)
        self._given: dict[int, Given] = {}
        self._ended: deque[Ended] = deque()
        self._expired = 0
        self._halting = self._halted = False
        self._turning = False
        self._alarm = Alarm(self._turn, clock)
        self._ends_ns, self._deadline = ends_ns, Alarm(self._cancel, clock)
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stopped: str | None = None
        """Null: not cut short."""
        self.sent_share = 0
        self.sender_cpu_ns = 0
        self.last_end_ns = clocks.t0_ns
        self.reason = ""
        """The engine's words for the first refused request: for the terminal alone, as they may quote it."""
        self.unsent = 0
        """Requests that were due at the end, without a free slot."""
        self.loop_delay_ms = array("d")
        self.crossing_delay_ms = array("d")

    def start(self) -> None:
        self._deadline.set(self._ends_ns)
        self._turn()

    def stop(self, reason: str) -> None:
        if self.stopped is None:
            self.stopped = reason
            self._lookahead.clear()
            self._halt()

    def close(self) -> None:
        self._alarm.close()
        self._deadline.close()

    def hear(self, message: FromSender) -> None:
        try:
            self._hear(message)
        except Exception as error:  # as in _turn
            self._fail(error)
        self._turn_soon()

    def _hear(self, message: FromSender) -> None:
        if isinstance(message, Halted):
            self._halted, self.unsent = True, message.unsent
        else:
            self._expired += len(message.expired) if isinstance(message, Batch) else 0
            self._tally.started, self._tally.in_flight = message.started - self._expired, message.in_flight
            self._lookahead.started(message.started)
        if isinstance(message, Batch):
            if message.ended:
                self.crossing_delay_ms.append((self._clock() - message.ended[-1].end_ns) / 1e6)
            self._ended += message.ended
            self._forget(message.expired)
        elif isinstance(message, Pulse):
            self._feel(message)

    def _forget(self, expired: Sequence[int]) -> None:
        """Drop expired requests; after an expired root without a time of its own, drop all later roots."""
        for number in expired:
            if self._given.pop(number).planned.send.due_ms is None:
                self._lookahead.no_more_roots()

    def sender_lost(self) -> None:
        """Record the requests that a dead sender had begun, and end the run with an error."""
        if self.over.done():
            return
        self.stopped = "failed"
        self._lookahead.clear()
        now_ns = self._clock()
        self._settle(len(self._ended))
        begun = [given for given in self._given.values() if given.planned.at_ns <= now_ns]
        for given in begun:
            self._settle_one(_lost(given.planned, now_ns))
        self._fail(SenderDiedError(f"the sender process died with up to {len(begun)} requests in flight"))

    def check_integrity(self) -> None:
        """Raise AssertionError if a request ended that was never given."""
        assert all(ended.number in self._given for ended in self._ended)
        assert self._tally.in_flight <= len(self._given)

    def _turn(self) -> None:
        """Hand over due requests, settle some that ended, and continue while there is more."""
        try:
            built = self._build()
            self._settle(max(built, SETTLED_PER_TURN))
        except Exception as error:  # a callback's exception would leave the run waiting for ever
            self._fail(error)
            return
        if self._ended or built:
            self._turn_soon()
        else:
            self._alarm.set(self._lookahead.wake_ns())
        self._check_over()

    def _turn_soon(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn_now)

    def _turn_now(self) -> None:
        self._turning = False
        if not self.over.done():
            self._turn()

    def _build(self) -> int:
        orders: list[Order] = []
        now_ns = self._clock()
        while len(orders) < BUILDS_PER_TURN and (planned := self._lookahead.pop(now_ns)) is not None:
            orders.append(self._order(planned))
            if self._clock() - now_ns > BUILD_NS:
                break
        if orders:
            self._link.give(orders)
        return len(orders)

    def _order(self, planned: Planned) -> Order:
        send = planned.send
        request = send.build()
        data = self._writer.write(request)
        share, most_bytes = sent_share(send.due_ms, request), request.most_response_bytes()
        if len(data) > LARGE_BODY_BYTES:  # the sender has it; here it is not needed any more
            request = msgspec.structs.replace(request, body=b"")
        self._given[planned.number] = Given(planned, request, share)
        self._lookahead.gave(len(data))
        until_ns = None if send.until_ms is None else self._clocks.t0_ns + round(send.until_ms * 1e6)
        fills, whole = send.due_ms is None, not request.stream
        return Order(planned.number, planned.at_ns, data, fills, until_ns, whole, most_bytes)

    def _settle(self, most: int) -> None:
        for _ in range(min(most, len(self._ended))):
            self._settle_one(self._ended.popleft())

    def _settle_one(self, ended: Ended) -> None:
        """Read the response, plan the follow-ups, write the record."""
        given = self._given.pop(ended.number)
        sent = Sent(given.request, ended, given.planned.parent_end_ms, held=ended.held or given.planned.held)
        response = answer_of(sent, self._clocks)
        if not self._halting:
            end_ms = self._clocks.trace_ms(ended.end_ns)
            follow_ups = given.planned.send.then(response)
            for follow_up in follow_ups:
                self._lookahead.follow(follow_up, ended.end_ns, end_ms)
            if follow_ups:
                self._build()
        record = given.planned.send.describe(response)
        self.reason = self.reason or reason_of(ended)
        self._write(record)
        self._tally.finish(record, told=ended.told_reads > 0)
        self.sent_share += given.share
        self.last_end_ns = max(self.last_end_ns, ended.end_ns)
        if self._alone and self._tally.only_refusals:
            self.stop("refused")

    def _feel(self, pulse: Pulse) -> None:
        self.sender_cpu_ns = pulse.cpu_ns
        self.loop_delay_ms.extend(delay_ns / 1e6 for delay_ns in pulse.delays_ns)
        self._tally.recent.ttft_ms.extend(first_ns / 1e6 for first_ns in pulse.first_reads_ns)
        self._tally.recent.itl_ms.extend(gap_ns / 1e6 for gap_ns in pulse.gaps_ns)

    def _fail(self, error: Exception) -> None:
        self.stopped = self.stopped or "failed"
        if not self.over.done():
            self.over.set_exception(error)

    def _check_over(self) -> None:
        if self._halted and not self._ended:  # what was never started is forgotten
            self._given.clear()
        if self._lookahead or self._given or self.over.done():
            return
        if self._halted:
            self.over.set_result(None)
        else:
            self._halt()

    def _cancel(self) -> None:
        """End the run at its deadline, as planned: unlike ``stop``, nothing was cut short."""
        self._lookahead.clear()
        self._halt("deadline")

    def _halt(self, kind: LossKind | None = None) -> None:
        if not self._halting:
            self._halting = True
            self._link.halt(kind)


def sent_share(due_ms: float | None, request: PlannedRequest) -> int:
    """SHA-256 over a request's due time after its cause, its path and its body; a number to be summed."""
    digest = hashlib.sha256(struct.pack("<d", -1.0 if due_ms is None else due_ms))
    digest.update(request.path.encode() + b"\0")
    digest.update(request.body)
    return int.from_bytes(digest.digest(), "big")


EXPLAINED = frozenset({400, 404, 413, 422})
"""Statuses whose body names a fault of the request; that of 401 or 403 may quote a key."""
MOST_REASON_CHARS = 300


def reason_of(ended: Ended) -> str:
    """Return the message in the body of a refusal; empty: it is none, or has no message."""
    if ended.status not in EXPLAINED:
        return ""
    said = decoded(b"".join([data for _, data in ended.reads]))
    said = said.get("error", said) if isinstance(said, dict) else None
    message = said.get("message") or said.get("detail") if isinstance(said, dict) else said
    return " ".join(str(message or "").split())[:MOST_REASON_CHARS]


def _lost(planned: Planned, now_ns: int) -> Ended:
    return Ended(
        number=planned.number,
        scheduled_ns=planned.at_ns,
        sent_ns=planned.at_ns,
        end_ns=max(now_ns, planned.at_ns),
        status=None,
        outcome="client_abort",
        error_kind="sender_lost",
        concurrency=0,
        held=False,
        told_reads=0,
        reads=[],
    )


HTTP_ERROR = 400


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that has ended, and what is known of it."""

    request: PlannedRequest
    ended: Ended
    parent_end_ms: float | None
    """End of the request that this one follows, on the trace's clock; null: a root."""
    held: bool = False
    """True if it waited for a slot of the concurrency limit."""


def answer_of(sent: Sent, clocks: Clocks) -> Response:
    """The record as far as the wire tells, and the output's ids and text."""
    request, ended = sent.request, sent.ended
    completion = parse_answer(request.path, ended.reads, stream=request.stream)
    if any(
        ids and not 0 <= min(ids) <= max(ids) <= MAX_TOKEN
        for ids in (completion.token_ids, completion.prompt_token_ids)
    ):
        completion.error_kind, completion.token_ids, completion.prompt_token_ids = "unparseable", None, None
    return Response(
        record=_record(sent, completion, clocks),
        end_ms=clocks.plan_ms(ended.end_ns),
        token_ids=completion.token_ids,
        prompt_token_ids=completion.prompt_token_ids,
        text=completion.text,
        body=b"" if request.stream else b"".join([data for _, data in ended.reads]),
    )


def _record(sent: Sent, completion: Completion, clocks: Clocks) -> Record:
    request, ended = sent.request, sent.ended
    arrival_ms = _ms(ended.sent_ns - clocks.zero_ns)
    status, error = _outcome(ended, completion, stream=request.stream)
    parent_end_ms = None if request.parent_id is None else sent.parent_end_ms
    return Record(
        request_id=request.request_id,
        session_id=request.session_id,
        session_source=None if request.session_id is None else "explicit",
        parent_id=request.parent_id,
        turn=request.turn,
        arrival_ms=arrival_ms,
        scheduled_ms=_ms(ended.scheduled_ns - clocks.zero_ns),
        held=sent.held or None,
        first_byte_ms=_since(ended.reads[0][0], ended.sent_ns) if ended.reads else None,
        ttft_ms=_since(completion.first_token_ns, ended.sent_ns) if request.stream else None,
        itl_ms=[round(gap_ns / 1e6, 3) for gap_ns in completion.gaps_ns],
        itl_tokens=completion.gap_tokens,
        e2e_ms=_ms(ended.end_ns - ended.sent_ns),
        status=status,
        http_status=ended.status,
        error=error,
        finish_reason=completion.finish_reason,
        endpoint=request.path,
        model=request.model,
        stream=request.stream,
        max_tokens=request.max_tokens,
        priority=request.priority,
        n=request.n,
        prompt_tokens=request.prompt_tokens if completion.prompt_tokens is None else completion.prompt_tokens,
        planned_prompt_tokens=request.prompt_tokens,
        output_tokens=_output_tokens(completion),
        cached_tokens=completion.cached_tokens,
        tokens_source=_tokens_source(completion, request.prompt_tokens),
        concurrency=ended.concurrency or None,
        think_ms=None if parent_end_ms is None else round(arrival_ms - parent_end_ms, 3),
    )


def _output_tokens(completion: Completion) -> int | None:
    """Usage's count; without usage (a stream cut short) the seen tokens."""
    if completion.output_tokens is not None:
        return completion.output_tokens
    return completion.seen_tokens or None


def _tokens_source(completion: Completion, planned: int | None) -> TokensSource | None:
    if completion.prompt_tokens is not None:
        return "usage"
    return "estimate" if completion.seen_tokens or planned is not None else None


def _outcome(ended: Ended, completion: Completion, *, stream: bool) -> tuple[Status, str | None]:
    if ended.outcome != "ok":
        return ended.outcome, ended.error_kind
    if ended.status is not None and ended.status >= HTTP_ERROR:
        return "error", f"http_{ended.status}"
    if completion.error_kind is not None:
        return "error", completion.error_kind
    if stream and not completion.done and completion.finish_reason is None:
        return "upstream_abort", "no_end_of_stream"
    return "ok", None


def _since(at_ns: int | None, start_ns: int) -> float | None:
    return None if at_ns is None else _ms(at_ns - start_ns)


def _ms(nanoseconds: float) -> float:
    """Milliseconds to the microsecond: finer digits are noise."""
    return round(nanoseconds / 1e6, 3)
