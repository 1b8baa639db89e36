"""What the client and the upstream see through the tap: each other's bytes, and nothing of the tap."""

import asyncio
import gzip
from types import SimpleNamespace
from typing import Any

import pytest

from tap.proxy.relay import Relay
from tests.waiting import standstill

COMPLETION = {"model": "m", "prompt": [1, 2, 3, 4, 5], "max_tokens": 4}


def usage(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def test_bytes_status_and_header_order_pass_both_ways(lab: Any) -> None:
    async def script(request: Any) -> None:
        request.write(
            b"HTTP/1.1 429 Slow Down\r\nRetry-After: 7\r\nSet-Cookie: a=1\r\nx-Odd: A\r\nSet-Cookie: b=2\r\n"
            b"Connection: X-Private\r\nX-Private: hop\r\nContent-Length: 3\r\n\r\nno!"
        )

    async def scenario() -> None:
        async with lab.tap(script) as (tap, upstream):
            head = (
                b"POST /v1/completions?x=%20&y HTTP/1.1\r\nHost: tap\r\nX-B: 1\r\nX-a: 2\r\nX-B: 3\r\n"
                b"Connection: close, X-Hop\r\nX-Hop: gone\r\nContent-Length: 2\r\n\r\n{}"
            )
            response = await tap.send(head)
            assert response.raw == (
                b"HTTP/1.1 429 Slow Down\r\nRetry-After: 7\r\nSet-Cookie: a=1\r\nx-Odd: A\r\nSet-Cookie: b=2\r\n"
                b"Content-Length: 3\r\nConnection: close\r\n\r\nno!"
            )
            assert upstream.requests[0].head == (
                b"POST /v1/completions?x=%%20&y HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nX-B: 1\r\nX-a: 2\r\nX-B: 3\r\n"
                b"Content-Length: 2\r\n\r\n" % upstream.port
            )

    asyncio.run(scenario())
    [record] = lab.records
    assert (record.status, record.http_status, record.error) == ("error", 429, "http_429")
    assert record.endpoint == "/v1/completions"


def test_chunk_boundaries_extensions_and_trailers_are_the_upstreams(lab: Any) -> None:
    body = b"5;x=y\r\ndata:\r\n3\r\n {}\r\n2\r\n\n\n\r\n0\r\nX-Trailer: t\r\n\r\n"

    async def script(request: Any) -> None:
        request.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for at in range(len(body)):  # every byte a write of its own
            request.write(body[at : at + 1])
            await asyncio.sleep(0)

    async def scenario() -> None:
        async with lab.tap(script) as (tap, _):
            response = await tap.post("/v1/completions", COMPLETION)
            assert response.raw_body == body

    asyncio.run(scenario())


def test_an_events_read_reaches_the_client_before_the_next_is_written(lab: Any) -> None:
    """No coalescing and no waiting: the upstream writes an event only once the client has the one before."""
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


def test_other_paths_and_methods_are_relayed_and_not_recorded(lab: Any) -> None:
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


def test_keep_alive_and_pipelining_keep_order_and_reuse_the_upstreams_connection(lab: Any) -> None:
    async def script(request: Any) -> None:
        request.write_json({"echo": request.body.decode()})

    async def scenario() -> None:
        async with lab.tap(script) as (tap, upstream):
            reader, writer = await tap.connect()
            for number in range(4):
                body = b"%d" % number
                writer.write(b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 1\r\n\r\n" + body)
            for number in range(4):
                await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(13) == b'{"echo": "%d"}' % number
            writer.close()
            assert upstream.connections == 1

    asyncio.run(scenario())


def test_a_chunked_request_body_passes_with_its_framing(lab: Any) -> None:
    raw = b'6\r\n{"prom\r\n7\r\npt": [1\r\n2\r\n]}\r\n0\r\n\r\n'

    async def script(request: Any) -> None:
        request.write_json({"choices": [], "usage": usage(1, 1)})

    async def scenario() -> None:
        async with lab.tap(script) as (tap, upstream):
            head = (
                b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            )
            assert (await tap.send(head + raw)).status == 200
            assert upstream.requests[0].raw_body == raw

    asyncio.run(scenario())
    [record] = lab.records
    assert record.prompt_tokens == 1
    assert record.hash_source == "engine"


def test_expect_100_continue_is_answered_by_the_upstream(lab: Any) -> None:
    async def upstream_conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Expect: 100-continue" in head
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert await reader.readexactly(2) == b"{}"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def scenario() -> None:
        server = await asyncio.start_server(upstream_conversation, "127.0.0.1", 0)
        async with server, lab.tap(server.sockets[0].getsockname()[1]) as (tap, _):
            reader, writer = await tap.connect()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
            )
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"{}")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\nok")
            writer.close()

    asyncio.run(scenario())


def test_a_client_that_leaves_aborts_the_upstream_at_once(lab: Any) -> None:
    async def script(request: Any) -> None:
        request.write_sse_head()
        await request.write_event({"choices": [{"index": 0, "text": "x"}]})
        await request.reader.read()  # until the tap closes

    async def scenario() -> None:
        async with lab.tap(script) as (tap, upstream):
            reader, writer = await tap.connect()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}")
            await reader.readuntil(b"\n\n\r\n")
            writer.close()
            await asyncio.wait_for(upstream.gone.wait(), 5)

    asyncio.run(scenario())
    [record] = lab.records
    assert (record.status, record.error, record.http_status) == ("client_abort", None, 200)
    assert record.ttft_ms is not None
    assert record.output_tokens == 1


def test_a_client_that_hangs_up_at_done_got_everything(lab: Any) -> None:
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


def test_an_upstream_that_dies_mid_stream_is_a_stream_cut_short(lab: Any) -> None:
    async def script(request: Any) -> None:
        request.write_sse_head()
        await request.write_event({"choices": [{"index": 0, "text": "x"}]})
        request.writer.transport.abort()

    async def scenario() -> None:
        async with lab.tap(script) as (tap, _):
            response = await tap.post("/v1/completions", {**COMPLETION, "stream": True})
            assert b'"text": "x"' in response.raw_body, "what had come is not lost"
            assert not response.ended_cleanly

    asyncio.run(scenario())
    [record] = lab.records
    assert (record.status, record.error) == ("upstream_abort", "upstream_closed")
    assert record.ttft_ms is not None


def test_a_response_that_only_the_close_ends_is_not_ended_cleanly_when_it_was_cut(lab: Any) -> None:
    """Chunked for an HTTP/1.0 client means: until close. A cut one must then be a reset, or it would look whole."""

    async def script(request: Any) -> None:
        request.write_sse_head()
        await request.write_event({"choices": [{"index": 0, "text": "x"}]})
        if request.target == b"/whole":
            request.end_chunks()
        else:
            request.writer.transport.abort()

    async def scenario() -> None:
        async with lab.tap(script) as (tap, _):
            whole = await tap.send(b"GET /whole HTTP/1.0\r\n\r\n")
            assert whole.raw_body == b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n'
            assert b"chunked" not in whole.head
            reader, writer = await tap.connect()
            writer.write(b"GET /cut HTTP/1.0\r\n\r\n")
            try:
                await reader.read()
                was_reset = False
            except ConnectionResetError:
                was_reset = True
            assert was_reset
            writer.close()

    asyncio.run(scenario())


def test_a_response_without_a_length_ends_with_the_connection_for_the_client_too(lab: Any) -> None:
    async def script(request: Any) -> None:
        request.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {}\n\n")
        await asyncio.sleep(0.01)
        request.write(b"data: [DONE]\n\n")
        await request.writer.drain()
        request.writer.close()

    async def scenario() -> None:
        async with lab.tap(script) as (tap, _):
            reader, writer = await tap.connect()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}")
            raw = await reader.read()
            assert raw.endswith(b"\r\nConnection: close\r\n\r\ndata: {}\n\ndata: [DONE]\n\n")
            writer.close()

    asyncio.run(scenario())
    assert lab.records[0].status == "ok"


def test_a_base_path_and_a_gateways_prefix_are_kept_and_the_endpoint_is_known(lab: Any) -> None:
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


def test_an_upstream_that_closes_before_answering_is_a_closed_connection_and_not_retried(lab: Any) -> None:
    async def script(request: Any) -> None:
        request.writer.transport.abort()

    async def scenario() -> None:
        async with lab.tap(script) as (tap, upstream):
            assert (await tap.post("/v1/completions", COMPLETION)).raw == b""
            assert len(upstream.requests) == 1

    asyncio.run(scenario())
    [record] = lab.records
    assert (record.status, record.http_status, record.ttft_ms) == ("upstream_abort", None, None)


def test_only_an_unreachable_upstream_is_a_502(lab: Any, free_port: int) -> None:
    async def scenario() -> None:
        async with lab.tap(free_port) as (tap, _):
            response = await tap.post("/v1/completions", COMPLETION)
            assert response.status == 502
            assert response.json["error"]["message"] == "tap cannot reach the upstream (connect_refused)"

    asyncio.run(scenario())
    [record] = lab.records
    assert (record.status, record.error, record.http_status) == ("error", "connect_refused", None)
    assert record.block_hashes is not None, "the request is known even so"


def test_a_connection_that_the_upstream_closed_while_idle_is_not_used_again(lab: Any) -> None:
    async def script(request: Any) -> None:
        request.write_json({"ok": True})
        if len(request.head) and request.target == b"/last":
            await request.writer.drain()
            request.writer.close()

    async def scenario() -> None:
        async with lab.tap(script) as (tap, upstream):
            for _ in range(3):
                assert (await tap.post("/last", {})).status == 200
                await asyncio.sleep(0.02)
            assert upstream.connections == 3

    asyncio.run(scenario())


def test_an_early_answer_does_not_leave_half_a_request_on_a_kept_connection(lab: Any) -> None:
    async def upstream_conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/early" in head:
            writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
            await reader.read()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(upstream_conversation, "127.0.0.1", 0)
        async with server, lab.tap(server.sockets[0].getsockname()[1]) as (tap, _):
            reader, writer = await tap.connect()
            writer.write(b"POST /early HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\npart")
            assert b"413 Too Large" in await reader.read()
            writer.close()
            after = await tap.send(b"GET /after HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
            assert after.raw_body == b"ok"

    asyncio.run(scenario())


def test_a_slow_client_stops_the_upstream_not_the_memory(lab: Any) -> None:
    piece = b"x" * 65536
    written = 0

    async def script(request: Any) -> None:
        nonlocal written
        request.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1024 * len(piece)))
        for _ in range(1024):
            request.write(piece)
            await request.writer.drain()
            written += len(piece)

    async def scenario() -> None:
        async with lab.tap(script) as (tap, _):
            reader, writer = await tap.connect()
            writer.transport.pause_reading()
            writer.write(b"GET /big HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
            assert await standstill(lambda: written) < 32 << 20, "64 MiB would have fitted into an unbounded tap"
            writer.transport.resume_reading()
            raw = await reader.read()
            assert len(raw.partition(b"\r\n\r\n")[2]) == 1024 * len(piece)
            writer.close()

    asyncio.run(scenario())


def test_a_request_body_streams_on_and_a_slow_upstream_stops_the_client_not_the_memory(lab: Any) -> None:
    piece = b"x" * 65536
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def upstream_conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(piece))
        begun.set()
        await go_on.wait()
        await reader.readexactly(1023 * len(piece))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def scenario() -> None:
        server = await asyncio.start_server(upstream_conversation, "127.0.0.1", 0)
        async with server, lab.tap(server.sockets[0].getsockname()[1]) as (tap, _):
            reader, writer = await tap.connect()
            written = 0
            length = 1024 * len(piece)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % length)

            async def upload() -> None:
                nonlocal written
                for _ in range(1024):
                    writer.write(piece)
                    await writer.drain()
                    written += len(piece)

            uploading = asyncio.create_task(upload())
            await begun.wait()  # the upstream reads the beginning while the client still writes
            assert await standstill(lambda: written) < 32 << 20
            go_on.set()
            await uploading
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK")
            writer.close()

    asyncio.run(scenario())
    assert lab.counts.unhashed == {"request_larger_than_the_copy": 1}


def test_a_client_that_leaves_in_mid_upload_aborts_the_upstream(lab: Any) -> None:
    gone = asyncio.Event()

    async def upstream_conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.read() == b'{"pro'
        gone.set()
        writer.close()
        await writer.wait_closed()

    async def scenario() -> None:
        server = await asyncio.start_server(upstream_conversation, "127.0.0.1", 0)
        async with server, lab.tap(server.sockets[0].getsockname()[1]) as (tap, _):
            _, writer = await tap.connect()
            writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 99\r\n\r\n{"pro')
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.close()
            await asyncio.wait_for(gone.wait(), 5)

    asyncio.run(scenario())
    [record] = lab.records
    assert (record.status, record.http_status) == ("client_abort", None)


def test_websocket_is_a_clear_501_and_other_upgrades_are_declined_silently(lab: Any) -> None:
    async def script(request: Any) -> None:
        assert not request.values(b"upgrade")
        request.write_json({"ok": True})

    async def scenario() -> None:
        async with lab.tap(script) as (tap, upstream):
            refused = await tap.send(
                b"GET /v1/realtime HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
            )
            assert refused.status == 501
            assert "WebSocket" in refused.json["error"]["message"]
            assert not upstream.requests
            offered = await tap.send(
                b"GET /x HTTP/1.1\r\nHost: t\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n"
            )
            assert offered.status == 200

    asyncio.run(scenario())


def test_gzip_passes_untouched_and_is_read_for_the_record(lab: Any) -> None:
    answer = gzip.compress(b'{"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}], "usage": %b}' % (
        b'{"prompt_tokens": 5, "completion_tokens": 1}'
    ))  # fmt: skip

    async def script(request: Any) -> None:
        request.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n")
        request.write(b"Content-Length: %d\r\n\r\n%b" % (len(answer), answer))

    async def scenario() -> None:
        async with lab.tap(script) as (tap, upstream):
            body = gzip.compress(b'{"prompt": [1, 2, 3, 4, 5], "model": "m"}')
            response = await tap.post("/v1/completions", body, b"Content-Encoding: gzip\r\n")
            assert response.raw_body == answer
            assert upstream.requests[0].body == body

    asyncio.run(scenario())
    [record] = lab.records
    assert (record.prompt_tokens, record.output_tokens, record.finish_reason) == (5, 1, "stop")
    assert len(record.block_hashes or []) == 1


def test_many_at_once_are_each_whole_and_each_recorded(lab: Any) -> None:
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


def test_a_fault_in_the_account_of_upstreams_costs_no_record() -> None:
    def fail() -> None:
        raise ValueError

    submitted: list[Any] = []
    relay: Any = Relay.__new__(Relay)
    relay._ended, relay._unsent, relay._assignment = False, [], SimpleNamespace(end=fail)
    relay._copy = copy = SimpleNamespace(request_bytes=1, response_bytes=2)
    link = SimpleNamespace(submit=lambda *found: submitted.append(found))
    relay._relays = relays = SimpleNamespace(in_flight=1, bytes_in=0, bytes_out=0, link=link)
    with pytest.raises(ValueError, match=r"^$"):
        relay._end("ok", None)
    assert [(found[0], *found[2:]) for found in submitted] == [(copy, "ok", None)]
    assert (relays.in_flight, relays.bytes_in, relays.bytes_out) == (0, 1, 2)
