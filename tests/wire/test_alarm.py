"""The alarm on real loops: never before its time, once for each time it is set, not at all when it is unset."""

import asyncio
import sys
from collections.abc import Callable
from time import perf_counter_ns

import pytest

from wire.alarm import Alarm, LoopWaker, Sleeper, TimerfdWaker, new_waker
from wire.loop import run

MS = 1_000_000


@pytest.fixture(params=[LoopWaker, TimerfdWaker, new_waker], ids=lambda waker: waker.__name__, autouse=True)
def waker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is TimerfdWaker and sys.platform != "linux":
        pytest.skip("timerfd is Linux's")
    monkeypatch.setattr("wire.alarm.new_waker", request.param)


@pytest.mark.parametrize("run_loop", [run, asyncio.run], ids=["uvloop", "asyncio"])
def test_alarm_rings_at_its_time(run_loop: Callable[..., list[int]]) -> None:
    async def ring_at(waits_ms: list[float]) -> list[int]:
        late_ns: list[int] = []
        rung = asyncio.Event()

        def ring() -> None:
            late_ns.append(perf_counter_ns() - due_ns)
            rung.set()

        alarm = Alarm(ring)
        for wait_ms in waits_ms:
            rung.clear()
            due_ns = perf_counter_ns() + round(wait_ms * MS)
            alarm.set(due_ns)
            await asyncio.wait_for(rung.wait(), 5)
        alarm.close()
        return late_ns

    late_ns = run_loop(ring_at([0.0, -3.0, 0.05, 0.3, 2.0, 15.0]))
    assert len(late_ns) == 6
    assert min(late_ns) >= 0


def test_alarm_can_be_moved_and_cancelled() -> None:
    async def move() -> None:
        rung_ns: list[int] = []
        silenced: list[int] = []
        rung = asyncio.Event()

        def ring() -> None:
            rung_ns.append(perf_counter_ns())
            rung.set()

        alarms = [Alarm(ring), Alarm(lambda: silenced.append(perf_counter_ns()))]
        now_ns = perf_counter_ns()
        for alarm in alarms:
            alarm.set(now_ns + 5 * MS)
        alarms[0].set(now_ns + 30 * MS)
        alarms[1].set(None)
        await asyncio.wait_for(rung.wait(), 5)
        await asyncio.sleep(0.01)
        for alarm in alarms:
            alarm.close()
        assert len(rung_ns) == 1
        assert rung_ns[0] >= now_ns + 30 * MS
        assert silenced == []

    run(move())


def test_sleeper_wakes_at_its_deadline_or_earlier() -> None:
    async def sleep() -> None:
        sleeper = Sleeper()
        due_ns = perf_counter_ns() + 2 * MS
        await sleeper.sleep_until(due_ns)
        assert perf_counter_ns() >= due_ns
        await sleeper.sleep_until(due_ns)  # past
        sleeping = asyncio.create_task(sleeper.sleep_until(due_ns + 10**12))
        await asyncio.sleep(0)
        assert not sleeping.done()
        sleeper.wake()
        await asyncio.wait_for(sleeping, 5)
        sleeper.wake()  # without a sleeping task
        sleeper.close()

    run(sleep())
