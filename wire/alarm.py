"""Alarms on the event loop, at an absolute time of ``perf_counter_ns``.

An event loop's timers count milliseconds: plain asyncio rings 0.65 ms late at the median and 1.2 ms at p99. A timerfd
counts nanoseconds, but waking from it takes 0.1 ms. So the alarm wakes the loop a little early, by a timerfd where
there is one, and takes further turns of the loop for the rest, reads and writes included (docs/dev/why.md).
"""

import asyncio
import ctypes
import os
import struct
import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Nanoseconds on a monotonic clock."""

NS_PER_S = 1_000_000_000
_TIMER_SPEC = struct.Struct("@4l")
"""``struct itimerspec``: seconds and nanoseconds of the interval, then of the value."""


class LoopWaker:
    """Wakes the loop near a time, by the loop's own timer, of milliseconds."""

    early_ns = 500_000
    """How much earlier it must be set."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def wake_in(self, wait_ns: int | None) -> None:
        """Call back in about that time; null: not at all. Replaces the time set before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if wait_ns is None else self._loop.call_later(wait_ns / NS_PER_S, self._ring)

    def close(self) -> None:
        self.wake_in(None)


class TimerfdWaker:
    """The same by Linux's timer as a file descriptor, of nanoseconds."""

    early_ns = 200_000

    def __init__(self, ring: Callable[[], None]) -> None:
        """Raises OSError or AttributeError on a system without timerfd."""
        self._ring = ring
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._wake)

    def wake_in(self, wait_ns: int | None) -> None:
        value = (0, 0) if wait_ns is None else divmod(max(1, wait_ns), NS_PER_S)  # zero disarms it
        self._libc.timerfd_settime(self._fd, 0, _TIMER_SPEC.pack(0, 0, *value), None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _wake(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # set again after it rang
            return
        self._ring()


def new_waker(ring: Callable[[], None]) -> LoopWaker | TimerfdWaker:
    """Return the most precise waker of this system."""
    try:
        return TimerfdWaker(ring)
    except (OSError, AttributeError):
        return LoopWaker(ring)


class Alarm:
    """Calls ``ring`` once the clock has reached the time set last."""

    def __init__(self, ring: Callable[[], None], clock: Clock = time.perf_counter_ns) -> None:
        self._ring = ring
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._waker = new_waker(self._wake)
        self._at_ns: int | None = None
        self._soon: asyncio.Handle | None = None

    def set(self, at_ns: int | None) -> None:
        """Ring at ``at_ns``, which may be past; null: not at all. Replaces the time set before."""
        if at_ns != self._at_ns:
            self._at_ns = at_ns
            self._wait()

    def close(self) -> None:
        self.set(None)
        self._waker.close()

    def _wait(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
        wait_ns = None if self._at_ns is None else self._at_ns - self._clock() - self._waker.early_ns
        if wait_ns is None or wait_ns > 0:
            self._waker.wake_in(wait_ns)
        else:
            self._soon = self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        if self._at_ns is None or self._clock() < self._at_ns:
            self._wait()
            return
        self._at_ns = None
        self._ring()


class Sleeper:
    """Sleep of a task to an absolute deadline. Make, use and close it on one event loop."""

    def __init__(self) -> None:
        self._woken = asyncio.Event()
        self._alarm = Alarm(self._woken.set)
        self.wake, self.close = self._woken.set, self._alarm.close

    async def sleep_until(self, deadline_ns: int | None) -> None:
        """Return at ``deadline_ns`` (at the next turn of the loop if that is past), or earlier after ``wake``."""
        if deadline_ns is not None and deadline_ns <= time.perf_counter_ns():
            await asyncio.sleep(0)
            return
        self._woken.clear()
        self._alarm.set(deadline_ns)
        await self._woken.wait()
