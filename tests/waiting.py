"""Waiting for a condition, where a fixed time would be too short on a machine that is busy with other things."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 60.0
"""Limit for any wait on such a machine."""
EQUAL_LOOKS = 3
"""Equal amounts in a row that mean a standstill: a busy machine may stall once."""


async def until(condition: Callable[..., object]) -> None:
    """Wait for something that is about to be, and has no event that a test could wait for."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def wait_until(condition: Callable[..., object]) -> None:
    """Wait likewise where no event loop runs."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come"
        time.sleep(0.02)


async def standstill(amount: Callable[[], T]) -> T:
    """Wait until ``amount()`` no longer changes; returns it."""
    before, equal = amount(), 0
    while equal < EQUAL_LOOKS:
        await asyncio.sleep(0.1)
        now = amount()
        before, equal = now, equal + 1 if now == before else 0
    return before
