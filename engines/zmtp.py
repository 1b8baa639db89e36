"""ZeroMQ's wire protocol (ZMTP 3.0, no security), as far as a subscriber to an engine's events needs it.

For a thread of its own: calls block. A library for it would be a dependency of 4 MB and a thread more.
"""

import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, Self
from urllib.parse import urlsplit

from wire.errors import WireError

SocketType = Literal["SUB", "DEALER"]

MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame: others of its message follow; its size has 8 bytes; it is no part of a message."""
MAX_FRAME_BYTES = 1 << 28
MAX_PARTS = 64
READ_BYTES = 1 << 16
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_SUBSCRIBE_ALL = b"\x01"
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds and probes until a peer that vanished counts as gone, where the platform has the options."""


def parse_endpoint(text: str) -> tuple[str, int]:
    """Read ``tcp://HOST:PORT``. Raises WireError that says what is wrong."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or not port or parts.scheme != "tcp" or parts.path or host == "*":
        raise WireError(f"{text!r} is no address of ZeroMQ's: expected tcp://HOST:PORT")
    return host, port


class ZmtpSocket:
    """Connection to a publisher (``SUB``: all of its topics) or a router (``DEALER``)."""

    def __init__(self, endpoint: tuple[str, int], kind: SocketType, *, timeout_s: float) -> None:
        """Connect and shake hands within ``timeout_s`` for each read. Raises OSError, or WireError for another peer."""
        self._buffer = bytearray()
        self._socket = socket.create_connection(endpoint, timeout_s)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            self._shake_hands(kind)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a ``receive`` of another thread ends with OSError."""
        with suppress(OSError):  # already gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def set_timeout(self, timeout_s: float | None) -> None:
        """Set the longest wait for a read; null: as long as it takes."""
        self._socket.settimeout(timeout_s)

    def send(self, parts: Sequence[bytes]) -> None:
        """Send a message."""
        frames = [frame(part, MORE) for part in parts[:-1]]
        self._socket.sendall(b"".join([*frames, frame(parts[-1], 0)]))

    def receive(self) -> list[bytes]:
        """Return the next message. Raises OSError at the connection's end, WireError for what is no message."""
        parts: list[bytes] = []
        while True:
            flags, body = self._read_frame()
            if flags & COMMAND:
                continue
            parts.append(body)
            if not flags & MORE:
                return parts
            if len(parts) == MAX_PARTS:
                raise WireError(f"a ZeroMQ message of more than {MAX_PARTS} parts")

    def _shake_hands(self, kind: SocketType) -> None:
        name = kind.encode()
        ready = b"\x05READY" + b"\x0bSocket-Type" + len(name).to_bytes(4, "big") + name
        self._socket.sendall(_GREETING + frame(ready, COMMAND))
        greeting = self._read(len(_GREETING))
        if greeting[:1] != b"\xff" or greeting[9:10] != b"\x7f" or greeting[10] < 3:
            raise WireError("the peer speaks no ZMTP 3; expected a ZeroMQ socket")
        if greeting[12:32].rstrip(b"\0") != b"NULL":
            raise WireError("the peer wants a ZeroMQ security mechanism; expected none")
        flags, body = self._read_frame()
        if not flags & COMMAND or not body.startswith(b"\x05READY"):
            raise WireError("the peer refused the connection; expected a ZeroMQ publisher or router")
        if kind == "SUB":
            self.send([_SUBSCRIBE_ALL])

    def _read_frame(self) -> tuple[int, bytes]:
        flags = self._read(1)[0]
        size = int.from_bytes(self._read(8 if flags & LONG else 1), "big")
        if size > MAX_FRAME_BYTES:
            raise WireError(f"a ZeroMQ frame of {size} bytes; expected at most {MAX_FRAME_BYTES}")
        return flags, self._read(size)

    def _read(self, count: int) -> bytes:
        buffer = self._buffer
        while len(buffer) < count:
            data = self._socket.recv(max(READ_BYTES, count - len(buffer)))
            if not data:
                raise ConnectionResetError("the peer closed the connection")
            buffer += data
        found = bytes(buffer[:count])
        del buffer[:count]
        return found


def frame(body: bytes, flags: int) -> bytes:
    """Return a frame on the wire."""
    if len(body) > 255:
        return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body
