"""What the tap is told from outside: SIGTERM and SIGINT to end, a second one to end now, SIGHUP to read files again."""

import asyncio
import signal


def end_before_the_start() -> None:
    """Let SIGTERM and SIGINT end what is being started, while nothing is at stake."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)


class Signals:
    """The signals from now on, as they come."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.stops: asyncio.Queue[None] = asyncio.Queue()
        self.reloads: asyncio.Queue[None] = asyncio.Queue()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stops.put_nowait, None)
        loop.add_signal_handler(signal.SIGHUP, self.reloads.put_nowait, None)
