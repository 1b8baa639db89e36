"""Sleeping to an absolute deadline, to a fraction of a millisecond, on an event loop.

An event loop's own timers count whole milliseconds, which is a decode step's error budget. Linux's timerfd wakes the
loop within some 0.1 ms without spinning; elsewhere the loop's timer comes near and the rest is yielded away.
"""

import asyncio
import contextlib
import ctypes
import os
import sys
from time import perf_counter_ns

_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1
_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000
_COARSE_NS = 2_000_000
_NS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """One sleeper's alarm clock, on the clock of ``perf_counter_ns``. Make, use and close it on one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] | None = None
        self._fd: int | None = None
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
            if fd >= 0:
                self._fd = fd
                self._loop.add_reader(fd, self._ring)

    async def sleep_until(self, deadline_ns: int) -> None:
        """Return at ``deadline_ns``, at the next turn of the loop if that is past, or earlier if ``wake`` is called."""
        if deadline_ns <= perf_counter_ns():
            await asyncio.sleep(0)
        elif self._fd is not None:
            self._set(self._fd, deadline_ns)
            await self._wait()
        else:
            await self._sleep_coarsely(deadline_ns)

    async def sleep(self) -> None:
        """Return when ``wake`` is called."""
        await self._wait()

    def wake(self) -> None:
        """End the sleep, if there is one."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def close(self) -> None:
        """Give the timer back."""
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    async def _wait(self) -> None:
        self._woken = self._loop.create_future()
        try:
            await self._woken
        finally:
            self._woken = None

    def _set(self, fd: int, deadline_ns: int) -> None:
        seconds, nanoseconds = divmod(deadline_ns, _NS)
        timer = _Itimerspec(_Timespec(0, 0), _Timespec(seconds, nanoseconds))
        if self._libc.timerfd_settime(fd, _ABSOLUTE, ctypes.byref(timer), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _ring(self) -> None:
        # A deadline that was moved meanwhile leaves nothing to read; then this is no ring.
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd or 0, 8)
            self.wake()

    async def _sleep_coarsely(self, deadline_ns: int) -> None:
        coarse_ns = deadline_ns - perf_counter_ns() - _COARSE_NS
        if coarse_ns > 0:
            timer = self._loop.call_later(coarse_ns / _NS, self.wake)
            try:
                await self._wait()
            finally:
                timer.cancel()
            if perf_counter_ns() < deadline_ns - 2 * _COARSE_NS:
                return
        while perf_counter_ns() < deadline_ns:  # noqa: ASYNC110 - no event comes: it is the time that is waited for
            await asyncio.sleep(0)
