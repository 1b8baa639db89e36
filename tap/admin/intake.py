"""Feeds of the tap's processes, read off their connections; pages are served in between."""

import asyncio
import time
from typing import Final

import msgspec

from tap.admin.state import LiveState
from tap.ipc.feed import RecorderStats, RecordFeed, WorkerStats
from wire.process import split_frames

RECORDS_AT_ONCE: Final = 16
"""Records counted before other tasks run; a long prompt takes a millisecond."""
REST: Final = 2.0
"""Pause as a multiple of the time spent on records: pages and feed cost at most a third of a core. Faster records are
skipped by their sender, which counts them."""
_READ_BYTES: Final = 256 << 10

_messages = msgspec.msgpack.Decoder(WorkerStats | RecorderStats | RecordFeed)


async def listen_for_feeds(state: LiveState, path: str) -> asyncio.Server:
    """Take messages on a unix socket at ``path`` into the state.

    A connection is read only as fast as its records are counted, so its sender notices and skips; memory is bounded.
    """

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _take_all(state, reader)
        except (ConnectionError, msgspec.MsgspecError):
            pass  # a sender that is gone or invalid; it connects again
        except asyncio.CancelledError:
            pass  # the process leaves; asyncio would log a cancelled stream task
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
    """Take a message, pausing within one with many records."""
    message = _messages.decode(payload)
    if not isinstance(message, RecordFeed):
        state.take(message, time.monotonic())
        return
    for start in range(0, len(message.records), RECORDS_AT_ONCE):
        began_s = time.monotonic()
        for record in message.records[start : start + RECORDS_AT_ONCE]:
            state.see(record, began_s)
        await asyncio.sleep(REST * (time.monotonic() - began_s))
