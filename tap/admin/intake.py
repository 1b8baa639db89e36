"""What the tap's processes push, taken off their connections; pages are served in between."""

import asyncio
import time
from typing import Final

import msgspec

from tap.admin.feed import RecorderStats, RecordFeed, WorkerStats
from tap.admin.state import LiveState
from tap.exchange import split_frames

RECORDS_AT_ONCE: Final = 16
"""Records looked at before anything else has its turn; long prompts take a millisecond each."""
_READ_BYTES: Final = 256 << 10

_messages = msgspec.msgpack.Decoder(WorkerStats | RecorderStats | RecordFeed)


async def listen_for_feeds(state: LiveState, path: str) -> asyncio.Server:
    """Take what comes on a unix socket at ``path`` into the state.

    A connection is read only as fast as its records are looked at, so a sender notices and skips; memory is bounded.
    """

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _take_all(state, reader)
        except ConnectionError:
            pass
        finally:
            writer.close()

    return await asyncio.start_unix_server(take, path, limit=_READ_BYTES)


async def _take_all(state: LiveState, reader: asyncio.StreamReader) -> None:
    buffer = bytearray()
    while data := await reader.read(_READ_BYTES):
        buffer += data
        for payload in split_frames(buffer):
            await take_frame(state, payload)


async def take_frame(state: LiveState, payload: bytes) -> None:
    """Take one message, pausing within one that holds many records."""
    message = _messages.decode(payload)
    if not isinstance(message, RecordFeed):
        state.take(message, time.monotonic())
        return
    for number, record in enumerate(message.records):
        state.see(record, time.monotonic())
        if number % RECORDS_AT_ONCE == RECORDS_AT_ONCE - 1:
            await asyncio.sleep(0)
