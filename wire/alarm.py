"""Alarms on the event loop, at an absolute time of ``perf_counter_ns``; sends requests at their arrival times.

Event loop timers have a resolution of 1 ms: plain asyncio is 0.65 ms late at the median and 1.2 ms at p99. A timerfd
has a resolution of 1 ns, but waking takes 0.1 ms. So the alarm wakes the loop early, by a timerfd if available, and
spins the loop for the remaining time, which also serves reads and writes (docs/dev/why.md).
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
    """Waker by the loop's timer, with a resolution of 1 ms."""

    early_ns = 500_000
    """Lead time that covers the timer's lateness."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def wake_in(self, wait_ns: int | None) -> None:
        """Call back after about ``wait_ns``; None: never. Replaces the previous time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if wait_ns is None else self._loop.call_later(wait_ns / NS_PER_S, self._ring)

    def close(self) -> None:
        self.wake_in(None)


class TimerfdWaker:
    """Waker by Linux's timerfd, with a resolution of 1 ns."""

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
        except BlockingIOError:  # the timer was set again after it expired
            return
        self._ring()


def new_waker(ring: Callable[[], None]) -> LoopWaker | TimerfdWaker:
    """Return the most precise waker of this system."""
    try:
        return TimerfdWaker(ring)
    except (OSError, AttributeError):
        return LoopWaker(ring)


class Alarm:
    """Calls ``ring`` when the clock reaches the last set time."""

    def __init__(self, ring: Callable[[], None], clock: Clock = time.perf_counter_ns) -> None:
        self._ring = ring
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._waker = new_waker(self._wake)
        self._at_ns: int | None = None
        self._soon: asyncio.Handle | None = None

    def set(self, at_ns: int | None) -> None:
        """Ring at ``at_ns``, which may be past; None: never. Replaces the previous time."""
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
    """Sleeps until an absolute deadline. Create, use and close on one event loop."""

    def __init__(self) -> None:
        self._woken = asyncio.Event()
        self._alarm = Alarm(self._woken.set)
        self.wake, self.close = self._woken.set, self._alarm.close

    async def sleep_until(self, deadline_ns: int | None) -> None:
        """Return at ``deadline_ns`` (in the next loop iteration if past), or earlier after ``wake``."""
        if deadline_ns is not None and deadline_ns <= time.perf_counter_ns():
            await asyncio.sleep(0)
            return
        self._woken.clear()
        self._alarm.set(deadline_ns)
        await self._woken.wait()
