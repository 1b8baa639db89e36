"""``python -m tap.admin FD``: the admin process, started by the supervisor with its end of a socket pair."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import uvicorn

from tap.admin.app import make_app
from tap.admin.health import probe_upstreams
from tap.admin.intake import listen_for_feeds
from tap.admin.state import LiveState
from tap.ipc.channel import Channel
from tap.ipc.control import AdminSetup, ServiceStats
from tap.ipc.exchange import Ready, Refused
from wire.loop import run

NICENESS: Final = 15
"""Priority below the relay and the recorder."""
TICK_S: Final = 1.0
MAX_CONNECTIONS: Final = 256
SHUTDOWN_S: Final = 1

_messages: Final = msgspec.msgpack.Decoder(AdminSetup | ServiceStats)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handling: the supervisor ends it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_pages(control: socket.socket) -> None:
    """Serve until the supervisor closes its side."""
    channel = await Channel.over(control, _messages)
    setup = await channel.messages.get()
    if not isinstance(setup, AdminSetup):
        return
    state = LiveState(setup)
    try:
        feeds = await listen_for_feeds(state, setup.feed_socket)
    except OSError as error:
        channel.send(Refused(f"the admin process cannot listen for numbers ({error.strerror})"))
        channel.close()
        return
    server = _make_server(state)
    with socket.socket(fileno=setup.listen_fd) as listener:
        tasks = [
            asyncio.create_task(server.serve(sockets=[listener])),
            asyncio.create_task(probe_upstreams(state)),
            asyncio.create_task(_tick(state)),
        ]
        channel.send(Ready())
        while (message := await channel.messages.get()) is not None:
            state.take(message, time.monotonic())
        server.should_exit = True
        await tasks[0]
    for task in tasks[1:]:
        task.cancel()
    feeds.close()


def _make_server(state: LiveState) -> uvicorn.Server:
    return _Server(
        uvicorn.Config(
            make_app(state),
            access_log=False,
            log_level="error",
            server_header=False,
            lifespan="off",
            ws="none",
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
    )


async def _tick(state: LiveState) -> None:
    while True:
        state.tick(time.monotonic())
        await asyncio.sleep(TICK_S)


def main(argv: Sequence[str]) -> int:
    """Serve with the socket of the given number."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    try:
        run(serve_pages(socket.socket(fileno=int(argv[0]))))
    except Exception as error:  # one line instead of a traceback; the supervisor restarts the process
        print(f"tap: the admin process failed ({type(error).__name__}: {error})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
