"""A plan's way through builder and sender in virtual time, against a target that answers when the test says."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import msgspec
import pytest

from loadgen.core.plan import Response, Send
from loadgen.core.request import PlannedRequest, request_headers
from loadgen.sending.crossing import Order
from loadgen.sending.lookahead import BUILD_AHEAD_MS, MOST_WAITING, Clocks
from loadgen.sending.planrun import PlanRun, SenderDiedError
from loadgen.sending.requestrun import RequestRun
from loadgen.sending.sender import Sender
from measure.tally import Tally
from tracefile import Record, RequestId
from wire.alarm import LoopWaker
from wire.errors import LossKind
from wire.url import parse_url

MS = 1_000_000
Follow = Callable[[Response], Sequence[Send]]


def planned(name: str, parent: str | None = None) -> PlannedRequest:
    return PlannedRequest(
        request_id=RequestId(name),
        path="/v1/completions",
        headers=request_headers(name, None),
        body=b'{"prompt":"%b"}' % name.encode(),
        model="m",
        max_tokens=2,
        prompt_tokens=4,
        parent_id=None if parent is None else RequestId(parent),
    )


@dataclass
class Bench:
    """A run under test: its target, what was built and sent and written, and when."""

    loop: Any
    service_ms: dict[str, float] = field(default_factory=dict)
    """How long each request takes; 10 unless named."""
    statuses: dict[str, int] = field(default_factory=dict)
    drips_bytes: dict[str, int] = field(default_factory=dict)
    """Size of the reads that a response has each millisecond until its end; none unless named."""
    timeout_ms: float | None = None
    built: list[tuple[float, str]] = field(default_factory=list)
    sent: list[tuple[float, str]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    names: dict[int, str] = field(default_factory=dict)
    sender: Sender | None = None
    running: PlanRun | None = None

    def now_ms(self) -> float:
        # The clock creeps a little with every look; whole tenths are what the plan says.
        return round(float(self.loop.now_ns()) / MS, 1)

    def send(
        self,
        name: str,
        due_ms: float | None,
        then: Callable[[Response], Sequence[Send]] | None = None,
        parent: str | None = None,
        until_ms: float | None = None,
    ) -> Send:
        def build() -> PlannedRequest:
            self.built.append((self.now_ms(), name))
            return planned(name, parent)

        return Send(due_ms, build, then or (lambda answer: ()), until_ms=until_ms)

    # The way to the sender: at once, as a socket would in no time.

    def give(self, orders: list[Order]) -> None:
        assert self.sender is not None
        for order in orders:
            self.names[order.number] = order.data.split(b"X-Request-Id: ")[1].split(b"\r\n")[0].decode()
        self.loop.call_soon(self.sender.take, orders)

    def halt(self, kind: LossKind | None = None) -> None:
        assert self.sender is not None
        self.loop.call_soon(self.sender.halt, kind)

    # The target.

    def start(self, request: RequestRun) -> None:
        name = self.names[request.number]
        self.sent.append((self.now_ms(), name))
        request.sent_ns = self.loop.now_ns()
        assert self.sender is not None
        self.sender.check_integrity()
        self.loop.call_later(self.service_ms.get(name, 10.0) / 1000, self.answer, request, name)
        if name in self.drips_bytes:
            self.drip(request, self.drips_bytes[name])

    def drip(self, request: RequestRun, size: int) -> None:
        if not request.end_ns:
            request.response_body(self.loop.now_ns(), b"", b"x" * size)
            self.loop.call_later(0.001, self.drip, request, size)

    def answer(self, request: RequestRun, name: str) -> None:
        if request.end_ns:
            return
        request.status = self.statuses.get(name, 200)
        if request.status == 200:
            request.reads = [(self.loop.now_ns(), answer_bytes())]
        request.response_end()

    def stop(self) -> None:
        assert self.running is not None
        self.running.stop("SIGINT")

    def lose(self) -> None:
        assert self.running is not None
        self.running.sender_lost()

    def names_sent(self) -> list[str]:
        return [name for _, name in self.sent]

    async def run(
        self,
        plan: Sequence[Send] | Iterator[Send],
        parallel: int | None = None,
        from_ms: float = 0.0,
        ends_ms: float | None = None,
    ) -> None:
        clock = self.loop.now_ns
        running = PlanRun(
            plan,
            self,
            self.records.append,
            self.tally,
            origin=parse_url("http://target"),
            clocks=Clocks(0, 0),
            not_before_ns=round(from_ms * MS),
            ends_ns=None if ends_ms is None else round(ends_ms * MS),
            clock=clock,
        )
        sender = Sender(
            self.start,
            lambda message: self.loop.call_soon(running.hear, message),
            start_anew=self.start,
            parallel=parallel,
            timeout_ns=None if self.timeout_ms is None else round(self.timeout_ms * MS),
            clock=clock,
        )
        self.running, self.sender = running, sender
        try:
            running.start()
            await running.over
            running.check_integrity()
            sender.check_integrity()
        finally:
            running.close()
            sender.close()


def answer_bytes() -> bytes:
    choice = {"index": 0, "text": "ab", "finish_reason": "length", "token_ids": [7, 8]}
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
    events = [{"choices": [choice]}, {"choices": [], "usage": usage}]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


Runner = Callable[[Callable[[Bench], Any]], Bench]


@pytest.fixture
def bench(virtual_time: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr("wire.alarm.new_waker", LoopWaker)
    benches: list[Bench] = []

    async def tested(test: Callable[[Bench], Any], loop: Any) -> None:
        monkeypatch.setattr("loadgen.sending.requestrun.perf_counter_ns", loop.now_ns)
        benches.append(Bench(loop))
        await test(benches[-1])

    def run(test: Callable[[Bench], Any]) -> Bench:
        virtual_time.run_virtually(lambda loop: tested(test, loop))
        return benches[-1]

    return run


def test_requests_go_out_when_they_are_due_and_are_built_before(bench: Runner) -> None:
    done = bench(lambda at: at.run([at.send("a", 70), at.send("b", 70), at.send("c", 195)]))
    assert done.sent == [(70.0, "a"), (70.0, "b"), (195.0, "c")]
    assert done.built == [(70 - BUILD_AHEAD_MS, "a"), (70 - BUILD_AHEAD_MS, "b"), (195 - BUILD_AHEAD_MS, "c")]
    assert [record.scheduled_ms for record in done.records] == [70.0, 70.0, 195.0]
    assert [record.concurrency for record in done.records] == [1, 2, 1]
    assert done.tally.statuses == {"ok": 3}


def test_a_follow_up_counts_from_its_parents_end(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.service_ms["a"] = 40
        await at.run([at.send("a", 5, lambda answer: [at.send("b", 25, parent="a")]), at.send("c", 60)])

    done = bench(test)
    # a ends at 45; b thinks for 25 from there. c was planned earlier and is due earlier.
    assert done.sent == [(5.0, "a"), (60.0, "c"), (70.0, "b")]
    first, _, second = done.records
    assert first.request_id == "a"
    assert second.parent_id == "a"
    end_ms = first.end_ms()
    assert end_ms is not None
    assert second.scheduled_ms == pytest.approx(end_ms + 25, abs=0.01)
    assert second.think_ms == pytest.approx(25, abs=0.1)


def test_branches_leave_together(bench: Runner) -> None:
    def branches(at: Bench) -> Follow:
        return lambda answer: [at.send("left", 10, parent="root"), at.send("right", 10, parent="root")]

    done = bench(lambda at: at.run([at.send("root", 0, branches(at))]))
    assert done.sent == [(0.0, "root"), (20.0, "left"), (20.0, "right")]


def test_a_late_answer_does_not_move_the_open_loop(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.service_ms["a"] = 5000
        await at.run([at.send("a", 0), at.send("b", 10), at.send("c", 20)])

    assert bench(test).sent == [(0.0, "a"), (10.0, "b"), (20.0, "c")]


def test_no_more_than_parallel_are_in_flight_and_the_wait_is_no_lag(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.service_ms |= {"a": 50, "b": 30}
        await at.run([at.send(name, 0) for name in "abcd"], parallel=2)

    done = bench(test)
    # b's slot is free at 30, c's at 40.
    assert done.sent == [(0.0, "a"), (0.0, "b"), (30.0, "c"), (40.0, "d")]
    assert done.tally.held == 2
    assert (done.tally.recent.lag_ms.count, [record.held for record in done.records].count(True)) == (2, 2)
    assert done.tally.recent.lag_ms.max < 0.1
    # From the schedule they were late all the same: no coordinated omission.
    late = [(record.arrival_ms or 0) + (record.ttft_ms or 0) - (record.scheduled_ms or 0) for record in done.records]
    assert sorted(map(round, late)) == [30, 40, 50, 50]


def test_what_has_no_time_of_its_own_takes_each_slot_as_it_falls_free(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.service_ms |= {"a": 50, "b": 30}
        await at.run([at.send(name, None) for name in "abcd"], parallel=2)

    done = bench(test)
    assert done.sent == [(0.0, "a"), (0.0, "b"), (30.0, "c"), (40.0, "d")]
    # All were built before, and nobody was held back: each was due when there was room for it.
    assert {at_ms for at_ms, _ in done.built} == {0.0}
    assert done.tally.held == 0
    by_name = {record.request_id: record for record in done.records}
    assert by_name[RequestId("d")].scheduled_ms == pytest.approx(40, abs=0.1)
    assert done.tally.recent.lag_ms.max < 0.1


def test_what_is_too_late_is_not_sent_and_has_no_record(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        await at.run([at.send(name, None, until_ms=15) for name in "abc"], parallel=1)

    done = bench(test)
    # c's slot is free at 20.
    assert done.names_sent() == ["a", "b"]
    assert [record.request_id for record in done.records] == ["a", "b"]


def test_a_request_that_takes_too_long_is_given_up_within_a_beat(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.service_ms["slow"] = 60_000
        at.timeout_ms = 200
        await at.run([at.send("slow", 0), at.send("quick", 100)], parallel=1)

    done = bench(test)
    assert [(record.request_id, record.status, record.error) for record in done.records] == [
        ("slow", "timeout", "timeout"),
        ("quick", "ok", None),
    ]
    assert done.records[0].e2e_ms == pytest.approx(200, abs=51)


def test_a_response_without_end_is_given_up_at_its_bound(bench: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.core.request.LEAST_RESPONSE_BYTES", 100_000)

    async def test(at: Bench) -> None:
        at.service_ms["endless"] = 60_000
        at.drips_bytes["endless"] = 1000
        await at.run([at.send("endless", 0), at.send("quick", 100)])

    done = bench(test)
    assert [(record.request_id, record.status, record.error) for record in done.records] == [
        ("endless", "error", "response_too_large"),
        ("quick", "ok", None),
    ]
    # A read counts 1,128 bytes: 100,000 + 2 tokens of 1,024 + 64 for each of the body's 20 bytes.
    assert done.records[0].e2e_ms == pytest.approx(91, abs=2)


def test_the_largest_responses_are_given_up_where_all_are_too_much(
    bench: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadgen.sending.sender.MOST_KEPT_BYTES", 400_000)

    async def test(at: Bench) -> None:
        at.service_ms |= {"huge": 60_000, "large": 400, "usual": 400}
        at.drips_bytes |= {"huge": 1500, "large": 500, "usual": 100}
        await at.run([at.send("huge", 0), at.send("large", 0), at.send("usual", 0)])

    assert [(record.request_id, record.error) for record in bench(test).records] == [
        ("huge", "response_too_large"),
        ("large", None),
        ("usual", None),
    ]


def test_a_request_for_log_probabilities_may_have_more() -> None:
    plain = planned("a")
    bodies = (plain.body, plain.body + b',"logprobs":20')
    bounds = [msgspec.structs.replace(plain, body=body, max_tokens=2000).most_response_bytes() for body in bodies]
    # 1 MiB, 1 KiB a token, 64 bytes a byte of the body; both of them eight times.
    assert bounds == [2**20 + 2000 * 1024 + 64 * 14, 2**20 + 8 * (2000 * 1024 + 64 * 28)]
    assert msgspec.structs.replace(plain, max_tokens=10**9).most_response_bytes() == 64 << 20


def test_a_plan_without_end_is_asked_for_one_root_at_a_time(bench: Runner) -> None:
    asked: list[int] = []

    def endless(at: Bench) -> Iterator[Send]:
        index = 0
        while True:
            asked.append(index)
            yield at.send(f"r{index}", index * 100.0)
            index += 1

    async def test(at: Bench) -> None:
        asyncio.get_running_loop().call_later(0.32, at.stop)
        await at.run(endless(at))

    done = bench(test)
    assert done.names_sent() == ["r0", "r1", "r2", "r3"]
    assert asked == [0, 1, 2, 3, 4]


def test_no_more_is_built_ahead_than_is_allowed(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.service_ms = {f"r{index}": 1000 for index in range(1000)}
        asyncio.get_running_loop().call_later(0.5, at.stop)
        await at.run((at.send(f"r{index}", None) for index in range(1000)), parallel=2)

    # Two are in flight, and as many as may wait do.
    assert len(bench(test).built) == 2 + MOST_WAITING


def test_stop_aborts_what_is_in_flight_and_records_it(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.service_ms["a"] = 1000
        asyncio.get_running_loop().call_later(0.1, at.stop)
        await at.run([at.send("a", 0, lambda answer: [at.send("never", 0)]), at.send("b", 0), at.send("late", 120)])

    done = bench(test)
    assert [(record.request_id, record.status) for record in done.records] == [("b", "ok"), ("a", "client_abort")]
    assert done.records[1].e2e_ms == pytest.approx(100, abs=1)
    assert done.running is not None
    assert done.running.stopped == "SIGINT"


def test_a_deadline_cancels_what_is_in_flight_and_nothing_follows(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.service_ms |= {"long": 500, "held": 10, "short": 60}
        follow: Follow = lambda answer: [at.send("after", 40, parent="short")]  # noqa: E731
        plan = [at.send("short", 0, follow), at.send("long", 10), at.send("held", 20), at.send("late", 200)]
        await at.run(plan, parallel=2, ends_ms=90)

    done = bench(test)
    # "short" ends at 60 and gives "held" its slot; "after" would be due at 100, behind the deadline.
    assert done.names_sent() == ["short", "long", "held"]
    ends = {record.request_id: (record.status, record.error, round(record.end_ms() or 0)) for record in done.records}
    assert ends == {
        "short": ("ok", None, 60),
        "held": ("ok", None, 70),
        "long": ("client_abort", "deadline", 90),
    }
    assert done.running is not None
    assert (done.running.stopped, done.running.unsent) == (None, 0)


def test_a_deadline_counts_due_requests_without_a_slot(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.service_ms["long"] = 500
        await at.run([at.send("long", 0), at.send("due", 10), at.send("later", 95)], parallel=1, ends_ms=90)

    done = bench(test)
    assert [(record.request_id, record.error) for record in done.records] == [("long", "deadline")]
    assert done.running is not None
    assert done.running.unsent == 1


def test_first_requests_all_refused_stop_the_run(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.statuses = {f"r{index}": 400 for index in range(10)}
        await at.run([at.send(f"r{index}", index * 100.0) for index in range(10)])

    done = bench(test)
    assert done.running is not None
    assert done.running.stopped == "refused"
    assert len(done.records) == 3
    assert done.records[0].error == "http_400"


def test_one_that_is_answered_lets_later_refusals_pass(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.statuses = {f"r{index}": 400 for index in range(1, 10)}
        await at.run([at.send(f"r{index}", index * 100.0) for index in range(10)])

    assert bench(test).tally.statuses == {"ok": 1, "error": 9}


def test_an_error_in_the_plan_ends_the_run_with_it(bench: Runner) -> None:
    def broken(answer: Response) -> Sequence[Send]:
        raise RuntimeError("the plan's own")

    with pytest.raises(RuntimeError, match="the plan's own"):
        bench(lambda at: at.run([at.send("a", 0, broken)]))


def test_a_sender_that_dies_ends_the_run_with_what_was_in_flight_recorded(bench: Runner) -> None:
    benches: list[Bench] = []

    async def test(at: Bench) -> None:
        benches.append(at)
        at.service_ms |= {"a": 1000, "b": 1000}
        at.loop.call_later(0.1, at.lose)
        await at.run([at.send("a", 0), at.send("b", 10), at.send("later", 140)])

    with pytest.raises(SenderDiedError, match="2 requests in flight"):
        bench(test)
    assert [(record.request_id, record.status, record.error) for record in benches[0].records] == [
        ("a", "client_abort", "sender_lost"),
        ("b", "client_abort", "sender_lost"),
    ]


def test_a_run_that_goes_on_keeps_to_the_plan_from_there(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.loop.jumping.now_s = 0.5
        await at.run([at.send("cut", 20), at.send("next", 700)], from_ms=500)

    # What should have been sent before is due when the run goes on.
    done = bench(test)
    assert done.sent == [(500.0, "cut"), (700.0, "next")]
    assert done.records[0].scheduled_ms == 500.0


def test_what_was_sent_has_one_share_in_whatever_order_it_ends(bench: Runner) -> None:
    def share(b_due_ms: float, a_service_ms: float) -> int:
        async def test(at: Bench) -> None:
            at.service_ms["a"] = a_service_ms
            await at.run([at.send("a", 0), at.send("b", b_due_ms)])

        running = bench(test).running
        assert running is not None
        return running.sent_share

    assert share(40, 10) == share(40, 90) != share(41, 10)


def test_the_record_says_what_the_wire_saw(bench: Runner) -> None:
    record = bench(lambda at: at.run([at.send("a", 0)])).records[0]
    assert record.status == "ok"
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (4, 2, 0)
    assert (record.tokens_source, record.finish_reason, record.http_status) == ("usage", "length", 200)
    assert record.ttft_ms == pytest.approx(10, abs=0.1)
    assert record.ttft_ms == pytest.approx(record.e2e_ms, abs=0.01)
    assert (record.itl_ms, record.itl_tokens) == ([], [])
