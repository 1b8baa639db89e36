"""The sender in virtual time, against a target that answers when the test says: order and times are literal."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from loadgen.plan import Answer, Send
from loadgen.request import PlannedRequest, request_headers
from loadgen.sender import BUILD_AHEAD_MS, Sender
from loadgen.tally import Tally
from tracefile import Record, RequestId
from wire.client import Exchange
from wire.stream import BodyRead

MS = 1_000_000
Follow = Callable[[Answer], Sequence[Send]]


def planned(name: str, parent: str | None = None) -> PlannedRequest:
    return PlannedRequest(
        request_id=RequestId(name),
        path="/v1/completions",
        headers=request_headers(name, None),
        body=b"{}",
        model="m",
        max_tokens=2,
        prompt_tokens=4,
        parent_id=None if parent is None else RequestId(parent),
    )


@dataclass
class Bench:
    """A sender under test: its target, what was built and sent and written, and when."""

    loop: Any
    service_ms: dict[str, float] = field(default_factory=dict)
    """How long each request takes; 10 unless named."""
    statuses: dict[str, int] = field(default_factory=dict)
    built: list[tuple[float, str]] = field(default_factory=list)
    sent: list[tuple[float, str]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    sender: Sender | None = None

    def now_ms(self) -> float:
        # The clock creeps a little with every look; whole tenths are what the plan says.
        return round(float(self.loop.now_ns()) / MS, 1)

    def send(
        self,
        name: str,
        due_ms: float,
        then: Callable[[Answer], Sequence[Send]] | None = None,
        parent: str | None = None,
    ) -> Send:
        def build() -> PlannedRequest:
            self.built.append((self.now_ms(), name))
            return planned(name, parent)

        return Send(due_ms, build, then or (lambda answer: ()))

    async def transmit(self, request: PlannedRequest) -> Exchange:
        name = request.request_id
        exchange = Exchange(sent_ns=self.loop.now_ns())
        self.sent.append((self.now_ms(), name))
        assert self.sender is not None
        self.sender.check_integrity()
        try:
            await asyncio.sleep(self.service_ms.get(name, 10.0) / 1000)
        except asyncio.CancelledError:
            exchange.outcome = "client_abort"
        exchange.end_ns = self.loop.now_ns()
        exchange.status = self.statuses.get(name, 200)
        if exchange.status == 200 and exchange.outcome == "ok":
            exchange.reads = [BodyRead(exchange.end_ns, answer_bytes())]
        return exchange

    def stop(self) -> None:
        assert self.sender is not None
        self.sender.stop("SIGINT")

    async def run(self, plan: Sequence[Send] | Iterator[Send], parallel: int | None = None) -> None:
        self.sender = Sender(
            plan, self.transmit, self.records.append, self.tally, t0_ns=0, parallel=parallel, clock=self.loop.now_ns
        )
        await self.sender.run()
        self.sender.check_integrity()


def answer_bytes() -> bytes:
    choice = {"index": 0, "text": "ab", "finish_reason": "length", "token_ids": [7, 8]}
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
    events = [{"choices": [choice]}, {"choices": [], "usage": usage}]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


@pytest.fixture
def bench(virtual_time: ModuleType) -> Callable[[Callable[[Bench], Any]], Bench]:
    def run(test: Callable[[Bench], Any]) -> Bench:
        benches: list[Bench] = []

        async def main(loop: Any) -> None:
            benches.append(Bench(loop))
            await test(benches[0])

        virtual_time.run_virtually(main)
        return benches[0]

    return run


Runner = Callable[[Callable[[Bench], Any]], Bench]


def test_requests_go_out_when_they_are_due_and_are_built_before(bench: Runner) -> None:
    done = bench(lambda at: at.run([at.send("a", 30), at.send("b", 30), at.send("c", 95)]))
    assert done.sent == [(30.0, "a"), (30.0, "b"), (95.0, "c")]
    assert done.built == [(30 - BUILD_AHEAD_MS, "a"), (30 - BUILD_AHEAD_MS, "b"), (95 - BUILD_AHEAD_MS, "c")]
    assert [record.scheduled_ms for record in done.records] == [30.0, 30.0, 95.0]
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
    assert done.tally.lag_ms.count == 2
    assert done.tally.lag_ms.max < 0.1
    # From the schedule they were late all the same: no coordinated omission.
    assert sorted(round(ttft) for ttft in done.tally.ttft_from_schedule_ms.values) == [30, 40, 50, 50]


def test_a_plan_without_end_is_asked_for_one_root_at_a_time(bench: Runner) -> None:
    asked: list[int] = []

    def endless(at: Bench) -> Iterator[Send]:
        index = 0
        while True:
            asked.append(index)
            yield at.send(f"r{index}", index * 100.0)
            index += 1

    async def test(at: Bench) -> None:
        asyncio.get_running_loop().call_later(0.35, at.stop)
        await at.run(endless(at))

    done = bench(test)
    assert [name for _, name in done.sent] == ["r0", "r1", "r2", "r3"]
    assert asked == [0, 1, 2, 3, 4]


def test_stop_aborts_what_is_in_flight_and_records_it(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.service_ms["a"] = 1000
        asyncio.get_running_loop().call_later(0.1, at.stop)
        await at.run([at.send("a", 0, lambda answer: [at.send("never", 0)]), at.send("b", 0), at.send("late", 500)])

    done = bench(test)
    assert [(record.request_id, record.status) for record in done.records] == [("b", "ok"), ("a", "client_abort")]
    assert done.records[1].e2e_ms == pytest.approx(100, abs=1)
    assert done.sender is not None
    assert done.sender.stopped == "SIGINT"


def test_first_requests_all_refused_stop_the_run(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.statuses = {f"r{index}": 400 for index in range(10)}
        await at.run([at.send(f"r{index}", index * 100.0) for index in range(10)])

    done = bench(test)
    assert done.sender is not None
    assert done.sender.stopped == "refused"
    assert len(done.records) == 3
    assert done.records[0].error == "http_400"


def test_one_that_is_answered_lets_later_refusals_pass(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.statuses = {f"r{index}": 400 for index in range(1, 10)}
        await at.run([at.send(f"r{index}", index * 100.0) for index in range(10)])

    assert bench(test).tally.statuses == {"ok": 1, "error": 9}


def test_an_error_in_the_plan_ends_the_run_with_it(bench: Runner) -> None:
    def broken(answer: Answer) -> Sequence[Send]:
        raise RuntimeError("the plan's own")

    with pytest.raises(RuntimeError, match="the plan's own"):
        bench(lambda at: at.run([at.send("a", 0, broken)]))


def test_the_record_says_what_the_wire_saw(bench: Runner) -> None:
    record = bench(lambda at: at.run([at.send("a", 0)])).records[0]
    assert record.status == "ok"
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (4, 2, 0)
    assert (record.tokens_source, record.finish_reason, record.http_status) == ("usage", "length", 200)
    assert record.ttft_ms == pytest.approx(10, abs=0.1)
    assert record.ttft_ms == record.e2e_ms
    assert (record.itl_ms, record.itl_tokens) == ([], [])
