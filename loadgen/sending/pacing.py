"""One alarm on the event loop, at an absolute time of ``perf_counter_ns``.

Loops keep time in milliseconds: asked for the time itself, plain asyncio rings 0.65 ms late at the median and 1.2 ms
at p99. A timerfd knows nanoseconds, but waking from it takes a tenth of a millisecond. So the alarm has the loop wake
a little before, by a timerfd where there is one, and goes round the loop for the rest, reading and writing as ever
(measured: docs/dev/why.md).
"""

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

Clock = Callable[[], int]
"""Nanoseconds on a monotonic clock."""

TIMERFD_EARLY_NS = 200_000
LOOP_EARLY_NS = 500_000
NS_PER_S = 1_000_000_000


class Waker(Protocol):
    """Wakes the loop near a time; ``early_ns`` is how long before it must be asked to."""

    early_ns: int

    def wake_in(self, wait_ns: int | None) -> None:
        """Call back in about that time; null: not at all. Asking again takes the place of what was asked before."""

    def close(self) -> None:
        """Call back no more."""


class LoopWaker:
    """The loop's own timer, of milliseconds."""

    early_ns = LOOP_EARLY_NS

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def wake_in(self, wait_ns: int | None) -> None:
        """See ``Waker``."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if wait_ns is None else self._loop.call_later(wait_ns / NS_PER_S, self._ring)

    def close(self) -> None:
        """See ``Waker``."""
        self.wake_in(None)


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec``: no interval, one value."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class TimerfdWaker:
    """Linux's timer as a file descriptor, of nanoseconds."""

    early_ns = TIMERFD_EARLY_NS

    def __init__(self, ring: Callable[[], None]) -> None:
        """Raises OSError or AttributeError where there is none."""
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _TimerSpec()
        self._loop.add_reader(self._fd, self._wake)

    def wake_in(self, wait_ns: int | None) -> None:
        """See ``Waker``."""
        # Zero would disarm it.
        self._spec.value_s, self._spec.value_ns = (0, 0) if wait_ns is None else divmod(max(1, wait_ns), NS_PER_S)
        self._libc.timerfd_settime(self._fd, 0, ctypes.byref(self._spec), None)

    def close(self) -> None:
        """See ``Waker``."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _wake(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # set anew since it rang
            return
        self._ring()


def new_waker(ring: Callable[[], None]) -> Waker:
    """The finest there is."""
    if sys.platform == "linux":
        try:
            return TimerfdWaker(ring)
        except (OSError, AttributeError):
            pass
    return LoopWaker(ring)


class Alarm:
    """Calls ``ring`` once the clock has reached the time set last; setting it again moves it."""

    def __init__(
        self,
        ring: Callable[[], None],
        clock: Clock = time.perf_counter_ns,
        waker: Callable[[Callable[[], None]], Waker] | None = None,
    ) -> None:
        """``waker``: null: the finest there is."""
        self._ring = ring
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._waker = (waker or new_waker)(self._wake)
        self._at_ns: int | None = None
        self._soon: asyncio.Handle | None = None

    def set(self, at_ns: int | None) -> None:
        """Ring at ``at_ns``, which may have passed; null: not at all."""
        if at_ns == self._at_ns:
            return
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._at_ns = at_ns
        if at_ns is None:
            self._waker.wake_in(None)
        else:
            self._wait(at_ns - self._clock())

    def close(self) -> None:
        """Ring no more."""
        self.set(None)
        self._waker.close()

    def _wait(self, wait_ns: int) -> None:
        if wait_ns <= self._waker.early_ns:
            self._soon = self._loop.call_soon(self._wake)
        else:
            self._waker.wake_in(wait_ns - self._waker.early_ns)

    def _wake(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._at_ns is None:
            return
        wait_ns = self._at_ns - self._clock()
        if wait_ns > 0:
            self._wait(wait_ns)
            return
        self._at_ns = None
        self._ring()
