"""The signals that a tap takes, from its first moment on."""

import asyncio
import signal


class Signals:
    """SIGTERM and SIGINT cancel the task until it has started, and are ``stops`` from then on; SIGHUP is a reload.

    SIGUSR1 and SIGUSR2 are ignored: to other servers they mean "open the logs again".
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.stops: asyncio.Queue[None] = asyncio.Queue()
        self.reloads: asyncio.Queue[None] = asyncio.Queue()
        self._starting = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        loop.add_signal_handler(signal.SIGHUP, self.reloads.put_nowait, None)

    def started(self) -> None:
        self._starting = None

    def _stop(self) -> None:
        if self._starting is None:
            self.stops.put_nowait(None)
        else:
            self._starting.cancel()
