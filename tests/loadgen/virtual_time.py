"""An event loop whose time jumps to the next timer instead of passing: a run of minutes takes none, exactly."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class JumpingSelector(selectors.DefaultSelector):
    """Never waits; what would have been waited is added to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("nothing is scheduled: the run would wait for ever")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now_s

    def now_ns(self) -> int:
        """The sender's clock."""
        # A spinning alarm must see time pass.
        self.jumping.now_s += 1e-6
        return round(self.jumping.now_s * 1e9)


def run_virtually(main: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> None:
    """Run ``main(loop)`` to its end in virtual time."""
    loop = VirtualLoop()
    try:
        loop.run_until_complete(main(loop))
    finally:
        loop.close()
