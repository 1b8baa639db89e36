"""Child processes of this program, and length-prefixed messages between processes.

A child is ``python -m MODULE FD``, connected to its parent by a socket pair; it exits when the parent closes the
socket. It has a separate session or process group, so that Ctrl-C reaches only the parent. Linux gives each session
the same share of a core, and priorities count within a session. A frame is a length and as many bytes.
"""

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, cast

PROJECT_ROOT = str(Path(__file__).resolve().parents[1])
REAP_POLL_S = 0.01

_LENGTH = struct.Struct("<I")


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of ``python -m module``, independent of the current folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """Return the environment in which ``module_command`` finds this program's modules."""
    path = os.pathsep.join(filter(None, (PROJECT_ROOT, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def start_child(
    module: str, pass_fds: Sequence[int] = (), *, new_session: bool = True
) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Run ``python -m module FD``; return the process and the parent's end of its socket."""
    parent_end, child_end = socket.socketpair()
    with child_end:
        process = subprocess.Popen(
            module_command(module, str(child_end.fileno())),
            pass_fds=(child_end.fileno(), *pass_fds),
            stdin=subprocess.DEVNULL,
            env=module_environment(),
            start_new_session=new_session,
            process_group=None if new_session else 0,
        )
    return process, parent_end


def parent_socket(argv: Sequence[str]) -> socket.socket:
    """Return the child's end of the socket, from the command line; ignore signals, since only the parent ends a child.

    SIGTTOU is ignored, too: on a terminal with ``tostop``, output to stderr would stop the child.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    return socket.socket(fileno=int(argv[0]))


async def child_left(process: "subprocess.Popen[bytes]", timeout_s: float) -> bool:
    """Wait for a child's exit; return False if it is still running after ``timeout_s``."""
    for _ in range(int(timeout_s / REAP_POLL_S)):
        if process.poll() is not None:
            return True
        await asyncio.sleep(REAP_POLL_S)
    return False


async def reap_child(process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    """Wait for a child's exit; kill the child after ``timeout_s``."""
    if not await child_left(process, timeout_s):
        process.kill()
        await asyncio.to_thread(process.wait)


def frame(payload: bytes) -> bytes:
    """Prefix the payload with its length (u32, little-endian)."""
    return _LENGTH.pack(len(payload)) + payload


def split_frames(buffer: bytearray) -> list[bytes]:
    """Remove and return the payloads of complete frames in ``buffer``; an incomplete frame stays."""
    payloads = []
    offset, length = 0, len(buffer)
    with memoryview(buffer) as view:
        while length - offset >= _LENGTH.size:
            start = offset + _LENGTH.size
            end = start + _LENGTH.unpack_from(view, offset)[0]
            if length < end:
                break
            payloads.append(view[start:end].tobytes())
            offset = end
    del buffer[:offset]
    return payloads


class FrameSocket(asyncio.Protocol):
    """End of a socket pair on an event loop: ``on_frame`` gets each payload, ``on_end`` the end of the stream."""

    def __init__(self, on_frame: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_frame, self._on_end = on_frame, on_end
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    async def attach(self, sock: socket.socket) -> Self:
        """Read from and write to ``sock`` on the running loop; return this end."""
        sock.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)
        return self

    def send(self, payload: bytes) -> None:
        """Send a payload; after the end of the stream it is dropped."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(payload))

    def finish(self) -> None:
        """Flush and half-close the socket; continue reading."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        for payload in split_frames(self._buffer):
            self._on_frame(payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_end()
