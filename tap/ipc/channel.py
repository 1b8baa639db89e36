"""Messages over a socket between the supervisor and a child, on an event loop."""

import asyncio
import socket
from typing import Any, cast

import msgspec

from tap.ipc.exchange import encode_frame
from wire.process import split_frames


class Channel(asyncio.Protocol):
    """End of a socket. Received messages wait in ``messages``; null is the end."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[Any]") -> None:
        self._decoder = decoder
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.congested = False
        """The other side has not read for a while."""

    @classmethod
    async def over(cls, sock: socket.socket, decoder: "msgspec.msgpack.Decoder[Any]") -> "Channel":
        sock.setblocking(False)
        _, channel = await asyncio.get_running_loop().create_unix_connection(lambda: cls(decoder), sock=sock)
        return channel

    def send(self, message: msgspec.Struct) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def finish(self) -> None:
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
            self.messages.put_nowait(self._decoder.decode(payload))

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.messages.put_nowait(None)
