"""``python -m tap.admin FD``: the admin process, started by the supervisor with its end of a socket pair."""

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tap.admin.app import make_app
from tap.admin.health import probe_upstreams
from tap.admin.state import LiveState
from tap.ipc.channel import Channel
from tap.ipc.exchange import AdminSetup, Ready, Refused, ServiceStats
from tap.ipc.feed import RecorderStats, WorkerStats
from wire.loop import run
from wire.process import parent_socket, split_frames

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
    channel = await Channel(_messages).attach(control)
    setup = await channel.messages.get()
    if not isinstance(setup, AdminSetup):
        return
    state = LiveState(setup)
    try:
        feeds = await listen_for_feeds(state, setup.feed_socket)
    except OSError as error:
        channel.post(Refused(f"the admin process cannot listen for numbers ({error.strerror})"))
        channel.close()
        return
    server = _make_server(state)
    with socket.socket(fileno=setup.listen_fd) as listener:
        tasks = [
            asyncio.create_task(server.serve(sockets=[listener])),
            asyncio.create_task(probe_upstreams(state)),
            asyncio.create_task(_tick(state)),
        ]
        channel.post(Ready())
        while (message := await channel.messages.get()) is not None:
            state.take(message, time.monotonic())
        server.should_exit = True
        await tasks[0]
    for task in tasks[1:]:
        task.cancel()
    feeds.close()


class _Connection(HttpToolsProtocol):
    """A client's connection: where there are too many, one that waits for its request ends for a new one.

    So connections that send a byte now and then keep no probe from its answer.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.made_s = time.monotonic()
        others = [one for one in self.connections if isinstance(one, _Connection) and one is not self]
        if len(others) >= MAX_CONNECTIONS - 1:
            self.connections.discard(oldest := min(others, key=lambda one: (one.busy, one.made_s)))
            oldest.transport.abort()

    @property
    def busy(self) -> bool:
        """True while a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete


def _make_server(state: LiveState) -> uvicorn.Server:
    return _Server(
        uvicorn.Config(
            make_app(state),
            access_log=False,
            log_level="error",
            server_header=False,
            lifespan="off",
            ws="none",
            http=_Connection,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
    )


_FEED_READ_BYTES: Final = 256 << 10

_feeds = msgspec.msgpack.Decoder(WorkerStats | RecorderStats)


async def listen_for_feeds(state: LiveState, path: str) -> asyncio.Server:
    """Take messages on a unix socket."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _take_all(state, reader)
        except (ConnectionError, msgspec.MsgspecError):
            pass  # a sender that is gone or invalid; it connects again
        except asyncio.CancelledError:
            pass  # the process leaves; asyncio would log a cancelled stream task
        finally:
            writer.close()

    return await asyncio.start_unix_server(take, path, limit=_FEED_READ_BYTES)


async def _take_all(state: LiveState, reader: asyncio.StreamReader) -> None:
    buffer = bytearray()
    while data := await reader.read(_FEED_READ_BYTES):
        buffer += data
        for payload in split_frames(buffer):
            state.take(_feeds.decode(payload), time.monotonic())


async def _tick(state: LiveState) -> None:
    while True:
        state.tick(time.monotonic())
        await asyncio.sleep(TICK_S)


def main(argv: Sequence[str]) -> int:
    sock = parent_socket(argv)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    try:
        run(serve_pages(sock))
    except Exception as error:  # one line instead of a traceback; the supervisor restarts the process
        print(f"tap: the admin process failed ({type(error).__name__}: {error})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
