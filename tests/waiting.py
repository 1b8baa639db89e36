"""Waiting for a condition, where a fixed time would be too short on a machine that is busy with other things."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 60.0
"""How long anything may take on such a machine."""


async def until(condition: Callable[..., object]) -> None:
    """Wait for something that is about to be, and has no event that a test could wait for."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def standstill(amount: Callable[[], T]) -> T:
    """Wait until ``amount()`` no longer changes; returns it."""
    before = amount()
    await asyncio.sleep(0.15)
    while before != (now := amount()):
        before = now
        await asyncio.sleep(0.15)
    return now
