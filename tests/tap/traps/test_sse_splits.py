"""An event stream cut anywhere is the same stream: byte for byte to the client, in all but times to the record."""

import asyncio
from typing import Any

import msgspec
import pytest

EVENTS = [
    b": a comment, as a keep-alive\n\n",
    b'data: {"choices": [{"index": 0, "text": "Hel"}]}\n\n',
    b'data:{"choices": [{"index": 0, "text": "lo"}]}\n\n',
    b"event: ping\n\n",
    b'event: x\nid: 7\nretry: 10\ndata: {"choices": [{"index": 0,\ndata: "text": "!", "finish_reason": "stop"}]}\n\n',
    b":\n\n",
    b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}\n\n',
    b"data: [DONE]\n\n",
]
REQUEST_BODY = b'{"model": "m", "prompt": [1, 2, 3, 4, 5], "stream": true, "max_tokens": 9}'
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (
    len(REQUEST_BODY),
    REQUEST_BODY,
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(pieces: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def in_step(text: bytes, step: int) -> list[bytes]:
    return [text[at : at + step] for at in range(0, len(text), step)]


def with_line_ends(line_end: bytes) -> list[bytes]:
    return [event.replace(b"\n", line_end) for event in EVENTS]


def every_cut(stream: bytes) -> list[list[bytes]]:
    """The stream in one read, in two reads for each split, and byte by byte."""
    halves = [[stream[:cut], stream[cut:]] for cut in range(1, len(stream))]
    return [[stream], *halves, in_step(stream, 1)]


CASES = {
    "events as chunks": every_cut(chunked(EVENTS)),
    "lines ended by CRLF": every_cut(chunked(with_line_ends(b"\r\n"))),
    "lines ended by CR": every_cut(chunked(with_line_ends(b"\r"))),
    "chunks that cut the events": [[chunked(in_step(b"".join(EVENTS), step))] for step in range(1, 40)],
    "all events in one chunk": every_cut(chunked([b"".join(EVENTS)])),
    "a byte order mark before them": every_cut(chunked([b"\xef\xbb\xbf", *EVENTS])),
}


async def wait_until_idle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.mark.parametrize("plays", CASES.values(), ids=CASES)
def test_stream_and_record_do_not_depend_on_reads(lab: Any, plays: list[list[bytes]]) -> None:
    upcoming = iter(plays)

    async def script(request: Any) -> None:
        request.write(HEAD)
        for piece in next(upcoming):
            request.write(piece)
            await wait_until_idle()

    async def scenario() -> None:
        async with lab.tap(script) as (tap, _):
            reader, writer = await tap.connect()
            for play in plays:
                writer.write(REQUEST)
                stream = HEAD + b"".join(play)
                assert await reader.readexactly(len(stream)) == stream
            writer.close()

    asyncio.run(scenario())
    records = lab.records
    assert len(records) == len(plays)
    for record in records:
        # The number of reads with tokens depends on the splits; the sum of tokens does not.
        assert record.ttft_ms is not None
        assert sum(record.itl_tokens or []) < 3
        assert len(record.itl_tokens or []) == len(record.itl_ms or [])
    assert len({what_does_not_depend_on_time(record) for record in records}) == 1
    assert (records[0].prompt_tokens, records[0].output_tokens, records[0].finish_reason) == (5, 3, "stop")
    assert (records[0].status, records[0].tokens_source) == ("ok", "usage")


def what_does_not_depend_on_time(record: Any) -> bytes:
    """The record without its id, its times, its place among the others, and who it was taken to follow."""
    facts = msgspec.to_builtins(record)
    for name in ("request_id", "session_id", "parent_id", "turn", "concurrency", "itl_tokens", "session_source"):
        facts.pop(name, None)
    timeless = {name: value for name, value in facts.items() if not name.endswith("_ms")}
    return msgspec.json.encode(timeless, order="sorted")
