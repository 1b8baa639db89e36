"""The event loop: uvloop where there is one."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

try:
    from uvloop import new_event_loop
except ImportError:  # no build for this platform: the standard loop does the same, slower
    from asyncio import new_event_loop

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """``asyncio.run`` on the fastest loop at hand."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
