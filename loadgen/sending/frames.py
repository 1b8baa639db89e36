"""Messages over a socket between processes of a run: a length, then as many bytes."""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import cast

_LENGTH = struct.Struct("<I")


def frame(payload: bytes) -> bytes:
    """The payload with its length (u32, little-endian) before it."""
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Takes a stream as it comes and gives the payloads that are whole."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that end within ``data``, in order."""
        if self._rest:
            data = self._rest + data
        payloads, at = [], 0
        while len(data) - at >= _LENGTH.size:
            end = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
            if len(data) < end:
                break
            payloads.append(data[at + _LENGTH.size : end])
            at = end
        self._rest = data[at:]
        return payloads


class FrameSocket(asyncio.Protocol):
    """One end of a socket pair on an event loop. ``on_frame`` has each payload as it comes, ``on_end`` the end."""

    def __init__(self, on_frame: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_frame, self._on_end = on_frame, on_end
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def over(
        cls, sock: socket.socket, on_frame: Callable[[bytes], None], on_end: Callable[[], None]
    ) -> "FrameSocket":
        """Over a connected socket, which is its own from here on."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, made = await loop.create_unix_connection(lambda: cls(on_frame, on_end), sock=sock)
        return made

    def send(self, payload: bytes) -> None:
        """Send a payload; what is sent after the end is lost, as it would be a moment before."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(payload))

    def close(self) -> None:
        """End it once what was sent has left."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Hand on the frames that are whole."""
        for payload in self._reader.feed(data):
            self._on_frame(payload)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell of the end."""
        self._transport = None
        self._on_end()
