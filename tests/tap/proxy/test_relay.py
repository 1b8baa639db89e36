"""What the client and the upstream see through the tap: each other's bytes, and nothing of the tap."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tap.proxy.relay import Relay

COMPLETION = {"model": "m", "prompt": [1, 2, 3, 4, 5], "max_tokens": 4}


def usage(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def test_each_event_is_relayed_before_the_next(lab: Any) -> None:
    """No coalescing, no delay: the upstream writes an event after the client has received the previous event."""
    seen = asyncio.Event()

    async def script(request: Any) -> None:
        request.write_sse_head()
        for _ in range(5):
            await request.write_event({"choices": [{"index": 0, "text": "x"}]})
            await asyncio.wait_for(seen.wait(), 5)
            seen.clear()
        request.end_chunks()

    async def scenario() -> None:
        async with lab.tap(script) as (tap, _):
            reader, writer = await tap.connect()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}")
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(5):
                await reader.readuntil(b"\n\n\r\n")
                seen.set()
            assert await reader.readuntil(b"0\r\n\r\n") == b"0\r\n\r\n"
            writer.close()

    asyncio.run(scenario())


def test_unrecorded_paths_and_methods_are_relayed(lab: Any) -> None:
    async def script(request: Any) -> None:
        if request.head.startswith(b"HEAD"):
            request.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n")
        else:
            request.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async def scenario() -> None:
        async with lab.tap(script) as (tap, upstream):
            for line in (b"GET /metrics?a=b", b"GET /v1/completions", b"DELETE /x", b"HEAD /health", b"OPTIONS *"):
                response = await tap.send(line + b" HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
                assert response.status == 200
            assert [request.target for request in upstream.requests][-2:] == [b"/health", b"*"]
            counted = await tap.post("/tokenize", {"prompt": "x"})
            assert counted.raw_body == b"ok"

    asyncio.run(scenario())
    assert lab.records == []
    assert lab.counts.offered == 0


def test_disconnect_after_done_is_a_complete_response(lab: Any) -> None:
    """As OpenAI's own client does, without waiting for the chunk that ends the body."""

    async def script(request: Any) -> None:
        request.write_sse_head()
        await request.write_event({"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]})
        await request.write_event(None)
        await request.reader.read()  # until the tap closes

    async def scenario() -> None:
        async with lab.tap(script) as (tap, upstream):
            reader, writer = await tap.connect()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}")
            await reader.readuntil(b"[DONE]\n\n\r\n")
            writer.close()
            await asyncio.wait_for(upstream.gone.wait(), 5)

    asyncio.run(scenario())
    [record] = lab.records
    assert (record.status, record.error, record.finish_reason) == ("ok", None, "stop")


def test_base_path_and_gateway_prefix(lab: Any) -> None:
    async def script(request: Any) -> None:
        request.write_json({"choices": [], "usage": usage(1, 1)})

    async def scenario() -> None:
        async with lab.tap(script, base_path="/gate/v1") as (tap, upstream):
            await tap.post("/chat/completions?api-version=1", {"messages": []})
            await tap.post("/completions", {"prompt": [1]})
            await tap.post("/embeddings", {"input": "x"})
            assert [request.target for request in upstream.requests] == [
                b"/gate/v1/chat/completions?api-version=1", b"/gate/v1/completions", b"/gate/v1/embeddings"
            ]  # fmt: skip

    asyncio.run(scenario())
    assert [record.endpoint for record in lab.records] == ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]


def test_concurrent_requests_are_complete_and_recorded(lab: Any) -> None:
    async def script(request: Any) -> None:
        request.write_sse_head()
        for _ in range(5):
            await request.write_event({"choices": [{"index": 0, "text": request.values(b"x-mark")[0].decode()}]})
        await request.write_event({"choices": [], "usage": usage(5, 5)})
        await request.write_event(None)
        request.end_chunks()

    async def scenario() -> None:
        async with lab.tap(script) as (tap, _):
            marks = [f"mark-{number:03}" for number in range(100)]
            responses = await asyncio.gather(
                *(
                    tap.post("/v1/completions", {**COMPLETION, "stream": True}, b"X-Mark: %b\r\n" % mark.encode())
                    for mark in marks
                )
            )
            for mark, response in zip(marks, responses, strict=True):
                assert response.raw_body.count(mark.encode()) == 5
                assert response.raw_body.count(b"mark-") == 5
                assert response.ended_cleanly

    asyncio.run(scenario())
    records = lab.records
    assert len(records) == len({record.request_id for record in records}) == 100
    assert all(record.status == "ok" and record.output_tokens == 5 for record in records)
    assert max(record.concurrency or 0 for record in records) > 10


def test_exception_in_upstream_load_loses_no_record() -> None:
    def fail() -> None:
        raise ValueError

    submitted: list[Any] = []
    relay: Any = Relay.__new__(Relay)
    relay._ended, relay._unsent, relay._assignment = False, [], SimpleNamespace(end=fail)
    relay._capture = copy = SimpleNamespace(request_bytes=1, response_bytes=2)
    link = SimpleNamespace(submit=lambda *actual: submitted.append(actual))
    relay._relays = relays = SimpleNamespace(in_flight=1, bytes_in=0, bytes_out=0, link=link)
    with pytest.raises(ValueError, match=r"^$"):
        relay._end("ok", None)
    assert [(actual[0], *actual[2:]) for actual in submitted] == [(copy, "ok", None)]
    assert (relays.in_flight, relays.bytes_in, relays.bytes_out) == (0, 1, 2)
