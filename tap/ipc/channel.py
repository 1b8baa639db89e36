"""Messages over a socket between the supervisor and a child, on an event loop."""

import asyncio
from typing import Any

import msgspec

from wire.process import FrameSocket


class Channel(FrameSocket):
    """End of a socket. Received messages wait in ``messages``; null is the end."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[Any]") -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.congested = False
        """The other side has not read for a while."""
        super().__init__(
            lambda payload: self.messages.put_nowait(decoder.decode(payload)), lambda: self.messages.put_nowait(None)
        )

    def post(self, message: msgspec.Struct) -> None:
        self.send(msgspec.msgpack.encode(message))

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False
