"""Alarms on the event loop, at an absolute time of ``perf_counter_ns``.

An event loop's timers count milliseconds: plain asyncio rings 0.65 ms late at the median and 1.2 ms at p99. A timerfd
counts nanoseconds, but waking from it takes 0.1 ms. So the alarm wakes the loop a little early, by a timerfd where
there is one, and takes further turns of the loop for the rest, reads and writes included (docs/dev/why.md).
"""

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Nanoseconds on a monotonic clock."""

NS_PER_S = 1_000_000_000


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


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec``: no interval, one value."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


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
        self._spec = _TimerSpec()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._wake)

    def wake_in(self, wait_ns: int | None) -> None:
        # Zero would disarm it.
        self._spec.value_s, self._spec.value_ns = (0, 0) if wait_ns is None else divmod(max(1, wait_ns), NS_PER_S)
        self._libc.timerfd_settime(self._fd, 0, ctypes.byref(self._spec), None)

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
    if sys.platform == "linux":
        try:
            return TimerfdWaker(ring)
        except (OSError, AttributeError):
            pass
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
        if at_ns == self._at_ns:
            return
        self._not_soon()
        self._at_ns = at_ns
        if at_ns is None:
            self._waker.wake_in(None)
        else:
            self._wait(at_ns - self._clock())

    def close(self) -> None:
        self.set(None)
        self._waker.close()

    def _not_soon(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None

    def _wait(self, wait_ns: int) -> None:
        if wait_ns <= self._waker.early_ns:
            self._soon = self._loop.call_soon(self._wake)
        else:
            self._waker.wake_in(wait_ns - self._waker.early_ns)

    def _wake(self) -> None:
        self._not_soon()
        if self._at_ns is None:
            return
        wait_ns = self._at_ns - self._clock()
        if wait_ns > 0:
            self._wait(wait_ns)
            return
        self._at_ns = None
        self._ring()


class Sleeper:
    """Sleep of a task to an absolute deadline. Make, use and close it on one event loop."""

    def __init__(self) -> None:
        self._alarm = Alarm(self.wake)
        self._woken: asyncio.Future[None] | None = None

    async def sleep_until(self, deadline_ns: int) -> None:
        """Return at ``deadline_ns``, at the next turn of the loop if that is past, or earlier after ``wake``."""
        if deadline_ns <= time.perf_counter_ns():
            await asyncio.sleep(0)
            return
        self._alarm.set(deadline_ns)
        try:
            await self.sleep()
        finally:
            self._alarm.set(None)

    async def sleep(self) -> None:
        self._woken = asyncio.get_running_loop().create_future()
        try:
            await self._woken
        finally:
            self._woken = None

    def wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def close(self) -> None:
        self._alarm.close()
