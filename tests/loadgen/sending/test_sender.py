"""A plan's way through builder and sender in virtual time, against a target that answers when the test says."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from loadgen.core.job import Response, Send
from loadgen.core.request import PlannedRequest, RequestWriter, request_headers
from loadgen.sending.exchange import Exchange
from loadgen.sending.planrun import BUILD_AHEAD_NS, MOST_WAITING, PlanRun
from measure.live_counts import LiveCounts
from tracefile.records.schema import Record, RequestId
from wire.alarm import LoopWaker
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
    drips_bytes: dict[str, int] = field(default_factory=dict)
    """Size of the reads that a response has each millisecond until its end; none unless named."""
    timeout_ms: float | None = None
    built: list[tuple[float, str]] = field(default_factory=list)
    sent: list[tuple[float, str]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    running: PlanRun | None = None

    @property
    def tally(self) -> LiveCounts:
        assert self.running is not None
        return self.running.count()

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

    # The target, in place of ``Connections``.

    def start(self, exchange: Exchange) -> None:
        assert exchange.order.request is not None
        name = exchange.order.request.request_id
        self.sent.append((self.now_ms(), name))
        exchange.sent_ns = self.loop.now_ns()
        assert self.running is not None
        self.running.check_integrity()
        self.loop.call_later(self.service_ms.get(name, 10.0) / 1000, self.answer, exchange, name)
        if name in self.drips_bytes:
            self.drip(exchange, self.drips_bytes[name])

    def start_anew(self, exchange: Exchange) -> None:
        raise AssertionError(f"{exchange.order.number}: no connection is stale here")

    def serve(self) -> None:
        """Nothing waits for a connection here."""

    def drip(self, exchange: Exchange, size: int) -> None:
        if not exchange.end_ns:
            exchange.response_body(self.loop.now_ns(), b"", b"x" * size)
            self.loop.call_later(0.001, self.drip, exchange, size)

    def answer(self, exchange: Exchange, name: str) -> None:
        if exchange.end_ns:
            return
        exchange.status = 200
        exchange.reads = [(self.loop.now_ns(), answer_bytes())]
        exchange.response_end()

    def stop(self) -> None:
        assert self.running is not None
        self.running.stop("SIGINT")

    def names_sent(self) -> list[str]:
        return [name for _, name in self.sent]

    async def run(
        self,
        plan: Sequence[Send] | Iterator[Send],
        parallel: int | None = None,
    ) -> None:
        target: Any = self
        running = self.running = PlanRun(
            plan,
            target,
            RequestWriter(parse_url("http://target")),
            self.records.append,
            t0_ns=0,
            parallel=parallel,
            timeout_s=None if self.timeout_ms is None else self.timeout_ms / 1000,
            clock=self.loop.now_ns,
        )
        try:
            running.start()
            await running.over
            running.check_integrity()
        finally:
            running.close()


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
        monkeypatch.setattr("loadgen.sending.exchange.perf_counter_ns", loop.now_ns)
        benches.append(Bench(loop))
        await test(benches[-1])

    def run(test: Callable[[Bench], Any]) -> Bench:
        virtual_time.run_virtually(lambda loop: tested(test, loop))
        return benches[-1]

    return run


def test_requests_are_built_ahead_and_sent_on_time(bench: Runner) -> None:
    done = bench(lambda at: at.run([at.send("a", 70), at.send("b", 70), at.send("c", 195)]))
    assert done.sent == [(70.0, "a"), (70.0, "b"), (195.0, "c")]
    ahead_ms = BUILD_AHEAD_NS / MS
    assert done.built == [(70 - ahead_ms, "a"), (70 - ahead_ms, "b"), (195 - ahead_ms, "c")]
    assert [record.scheduled_ms for record in done.records] == [70.0, 70.0, 195.0]
    assert [record.concurrency for record in done.records] == [1, 2, 1]
    assert done.tally.statuses == {"ok": 3}


def test_follow_up_is_due_from_the_end_of_the_parent(bench: Runner) -> None:
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


def test_parallel_limits_in_flight_without_lag(bench: Runner) -> None:
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


def test_late_requests_are_not_sent(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        await at.run([at.send(name, None, until_ms=15) for name in "abc"], parallel=1)

    done = bench(test)
    # c's slot is free at 20.
    assert done.names_sent() == ["a", "b"]
    assert [record.request_id for record in done.records] == ["a", "b"]


def test_request_timeout_within_a_beat(bench: Runner) -> None:
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


def test_endless_response_is_aborted_at_its_limit(bench: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_requests_ahead_are_bounded(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.service_ms = {f"r{index}": 1000 for index in range(1000)}
        asyncio.get_running_loop().call_later(0.5, at.stop)
        await at.run((at.send(f"r{index}", None) for index in range(1000)), parallel=2)

    # Two are in flight, and as many as may wait do.
    assert len(bench(test).built) == 2 + MOST_WAITING


def test_stop_aborts_and_records_requests_in_flight(bench: Runner) -> None:
    async def test(at: Bench) -> None:
        at.service_ms["a"] = 1000
        asyncio.get_running_loop().call_later(0.1, at.stop)
        await at.run([at.send("a", 0, lambda answer: [at.send("never", 0)]), at.send("b", 0), at.send("late", 120)])

    done = bench(test)
    assert [(record.request_id, record.status) for record in done.records] == [("b", "ok"), ("a", "client_abort")]
    assert done.records[1].e2e_ms == pytest.approx(100, abs=1)
    assert done.running is not None
    assert done.running.stopped == "SIGINT"
