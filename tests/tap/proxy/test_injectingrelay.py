"""Injection over real sockets: the client sees what it would have seen, the recorder sees what was asked for."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engines.dialect import DialectName
from engines.facts import EngineFacts
from engines.recognition import DIALECTS
from tap.ipc.messages import UpstreamEntry
from tap.proxy.ejection import Ejection
from tap.supervisor.startup import check_injection
from tests.fakes.strict_engines import ENGINES, StrictEngine, TensorRtLlm
from tests.tap.proxy import vllm_rendering as vllm
from tests.waiting import until
from tracefile.records.errors import InputError
from wire.url import Origin

Script = Callable[[Any], Awaitable[None]]
BOTH = frozenset({"usage", "token-ids"})

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ANSWERS = {
    TEXT: vllm.Answer(
        chat=False,
        prompt_token_ids=[1, 2, 3, 4, 5],
        steps=[vllm.Step(0, [11], {"text": "a"}), vllm.Step(0, [12, 13, 14], {"text": '"token_ids":[1]'}, "length")],
        cached_tokens=4,
    ),
    CHAT: vllm.Answer(
        chat=True,
        prompt_token_ids=[1, 2, 3, 4, 5],
        steps=[
            vllm.Step(0, [11], {"content": "☃"}),
            vllm.Step(0, [12, 13], None),
            vllm.Step(0, [14], {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}, "tool_calls"),
        ],
    ),
}
REQUESTS: dict[str, dict[str, Any]] = {
    TEXT: {"model": "tiny", "prompt": "hi", "max_tokens": 4},
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
}


def asked(request: Any) -> dict[str, bool]:
    """What a request asks vLLM for, as vLLM reads it."""
    fields = json.loads(request.body)
    return {
        "usage": bool((fields.get("stream_options") or {}).get("include_usage")),
        "ids": bool(fields.get("return_token_ids")),
    }


def endpoint_of(request: Any) -> str:
    return CHAT if b"chat" in request.target else TEXT


async def like_vllm(request: Any) -> None:
    """Answers streamed requests with an event a chunk, others with one body of known length."""
    answer, wants = ANSWERS[endpoint_of(request)], asked(request)
    if json.loads(request.body).get("stream"):
        request.write_sse_head()
        for event in vllm.stream_events(answer, **wants):
            request.write(b"%x\r\n%b\r\n" % (len(event), event))
            await request.writer.drain()
            await asyncio.sleep(0)
        request.end_chunks()
    else:
        body = vllm.whole_body(answer, ids=wants["ids"])
        request.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nX-A: b\r\n" % len(body))
        request.write(b"content-type: application/json\r\n\r\n" + body)


def unchunked(raw: bytes) -> bytes:
    """A complete chunked body without its framing."""
    body = b""
    while True:
        line, _, raw = raw.partition(b"\r\n")
        size = int(line, 16)
        body, raw = body + raw[:size], raw[size + 2 :]
        if size == 0:
            assert raw == b"", "bytes behind the last chunk"
            return body


def plain_stream(path: str) -> bytes:
    return b"".join(vllm.stream_events(ANSWERS[path], usage=False, ids=False))


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("wanted", [{"usage"}, {"token-ids"}, BOTH])
def test_a_stream_is_the_clients_and_its_record_has_usage_and_ids(lab: Any, path: str, wanted: set[str]) -> None:
    async def scenario() -> None:
        async with lab.tap(like_vllm, inject=frozenset(wanted)) as (tap, upstream):
            response = await tap.post(path, REQUESTS[path] | {"stream": True})
            assert asked(upstream.requests[0]) == {"usage": "usage" in wanted, "ids": "token-ids" in wanted}
            assert unchunked(response.raw_body) == plain_stream(path)
            assert response.head == (
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                b"Transfer-Encoding: chunked\r\nConnection: close"
            )

    asyncio.run(scenario())
    [record] = lab.records
    assert record.injected == sorted(wanted)
    assert (record.status, record.finish_reason) == ("ok", "length" if path == TEXT else "tool_calls")
    if "usage" in wanted:
        assert (record.prompt_tokens, record.output_tokens, record.tokens_source) == (5, 4, "usage")
    if "token-ids" in wanted:
        assert record.hash_source == "engine"
        assert len(record.block_hashes) == 1
    if wanted == BOTH:
        assert record.output_hash_source == "engine"
        assert len(record.output_block_hashes) == 1  # blocks of 4 tokens: the second of 5 + 4 − 1 holds output


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_whole_answer_has_the_length_and_the_bytes_that_it_would_have_had(lab: Any, path: str) -> None:
    async def scenario() -> None:
        async with lab.tap(like_vllm, inject=BOTH) as (tap, upstream):
            response = await tap.post(path, REQUESTS[path])
            assert asked(upstream.requests[0]) == {"usage": False, "ids": True}
            body = vllm.whole_body(ANSWERS[path], ids=False)
            assert response.raw == (
                b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nX-A: b\r\ncontent-type: application/json\r\n"
                b"Connection: close\r\n\r\n%b" % (len(body), body)
            )

    asyncio.run(scenario())
    [record] = lab.records
    assert record.injected == ["token-ids"]
    assert (record.hash_source, record.output_hash_source) == ("engine", "engine")


def test_a_stream_in_chunks_of_a_byte_is_the_same_stream(lab: Any) -> None:
    async def script(request: Any) -> None:
        request.write_sse_head()
        for byte in b"".join(vllm.stream_events(ANSWERS[CHAT], **asked(request))):
            request.write(b"1\r\n%c\r\n" % byte)
            await asyncio.sleep(0)
        request.end_chunks()

    async def scenario() -> None:
        async with lab.tap(script, inject=BOTH) as (tap, _):
            response = await tap.post(CHAT, REQUESTS[CHAT] | {"stream": True})
            assert unchunked(response.raw_body) == plain_stream(CHAT)

    asyncio.run(scenario())


def test_a_stream_in_one_write_is_the_same_stream(lab: Any) -> None:
    async def script(request: Any) -> None:
        stream = b"".join(vllm.stream_events(ANSWERS[CHAT], **asked(request)))
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        request.write(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(stream), stream))

    async def scenario() -> None:
        async with lab.tap(script, inject=BOTH) as (tap, _):
            response = await tap.post(CHAT, REQUESTS[CHAT] | {"stream": True})
            assert unchunked(response.raw_body) == plain_stream(CHAT)

    asyncio.run(scenario())


def test_an_events_read_reaches_the_client_before_the_next_is_written(lab: Any) -> None:
    seen = asyncio.Event()

    async def script(request: Any) -> None:
        request.write_sse_head()
        for event in vllm.stream_events(ANSWERS[TEXT], usage=False, ids=True):
            request.write(b"%x\r\n%b\r\n" % (len(event), event))
            await asyncio.wait_for(seen.wait(), 5)
            seen.clear()
        request.end_chunks()

    async def scenario() -> None:
        async with lab.tap(script, inject=BOTH) as (tap, _):
            reader, writer = await tap.connect()
            body = json.dumps(REQUESTS[TEXT] | {"stream": True}).encode()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(3):
                await reader.readuntil(b"\n\n\r\n")
                seen.set()
            assert await reader.readuntil(b"0\r\n\r\n") == b"0\r\n\r\n"
            writer.close()

    asyncio.run(scenario())


def test_requests_follow_one_another_on_both_connections(lab: Any) -> None:
    async def scenario() -> None:
        async with lab.tap(like_vllm, inject=BOTH) as (tap, upstream):
            reader, writer = await tap.connect()
            for _ in range(2):
                body = json.dumps(REQUESTS[CHAT]).encode()
                writer.write(b"POST %b HTTP/1.1\r\nHost: t\r\n" % CHAT.encode())
                writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                assert await reader.readexactly(length) == vllm.whole_body(ANSWERS[CHAT], ids=False)
                body = json.dumps(REQUESTS[TEXT] | {"stream": True}).encode()
                writer.write(b"POST %b HTTP/1.1\r\nHost: t\r\n" % TEXT.encode())
                writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
                await reader.readuntil(b"\r\n\r\n")
                raw = await reader.readuntil(b"\r\n0\r\n\r\n")
                assert unchunked(raw) == plain_stream(TEXT)
            writer.close()
            assert upstream.connections == 1

    asyncio.run(scenario())


def test_a_chunked_request_gets_a_length_and_loses_what_would_compress_its_answer(lab: Any) -> None:
    async def scenario() -> None:
        async with lab.tap(like_vllm, inject=BOTH) as (tap, upstream):
            body = json.dumps(REQUESTS[TEXT]).encode()
            chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (1, body[at : at + 1]) for at in range(len(body)))
            response = await tap.send(
                b"POST /v1/completions?q HTTP/1.1\r\nHost: t\r\nX-1: a\r\nTransfer-Encoding: chunked\r\n"
                b"Trailer: X-T\r\nAccept-Encoding: gzip, br\r\nConnection: close\r\n\r\n%b0\r\nX-T: 1\r\n\r\n" % chunks
            )
            assert response.status == 200
            sent = upstream.requests[0]
            assert sent.head == (
                b"POST /v1/completions?q HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nX-1: a\r\nAccept-Encoding: identity\r\n"
                b"Content-Length: %d\r\n\r\n" % (upstream.port, len(body) + len(b',"return_token_ids":true'))
            )
            assert sent.body == body[:-1] + b',"return_token_ids":true}'

    asyncio.run(scenario())


def test_what_the_client_asked_for_itself_is_relayed_byte_for_byte(lab: Any) -> None:
    fields = REQUESTS[CHAT] | {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    raw_request = json.dumps(fields).encode()
    written: list[bytes] = []

    async def script(request: Any) -> None:
        events = vllm.stream_events(ANSWERS[CHAT], **asked(request))
        written.extend(b"%x;ext\r\n%b\r\n" % (len(event), event) for event in events)
        request.write_sse_head()
        for piece in written:
            request.write(piece)
        request.write(b"0\r\nX-Trailer: t\r\n\r\n")

    async def scenario() -> None:
        async with lab.tap(script, inject=BOTH) as (tap, upstream):
            chunked = b"%x;x\r\n%b\r\n0\r\n\r\n" % (len(raw_request), raw_request)
            head = (
                b"POST %b HTTP/1.1\r\nHost: t\r\nAccept-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"
                % CHAT.encode()
            )
            response = await tap.send(head + b"Connection: close\r\n\r\n" + chunked)
            assert upstream.requests[0].raw_body == chunked
            assert upstream.requests[0].values(b"accept-encoding") == [b"gzip"]
            assert response.raw_body == b"".join(written) + b"0\r\nX-Trailer: t\r\n\r\n"

    asyncio.run(scenario())
    [record] = lab.records
    assert not record.injected
    assert record.hash_source == "engine"


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        (b"Content-Encoding: gzip\r\n", "request_encoded"),
        (b"Content-Digest: sha-256=:x:\r\n", "request_signed"),
        (b"Expect: 100-continue\r\n", "request_waits_for_continue"),
    ],
)
def test_a_body_that_must_stay_as_it_is_stays(lab: Any, headers: bytes, reason: str) -> None:
    body = json.dumps(REQUESTS[TEXT] | {"stream": True}).encode()
    sent = gzip.compress(body, mtime=0) if reason == "request_encoded" else body

    async def script(request: Any) -> None:
        request.write_json({"ok": True})

    async def scenario() -> None:
        async with lab.tap(script, inject=BOTH) as (tap, upstream):
            await tap.post(TEXT, sent, headers)
            assert upstream.requests[0].body == sent
            assert tap.relays.passed_by == {reason: 1}

    asyncio.run(scenario())
    assert not lab.records[0].injected


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_too_large_to_be_copied_passes_untouched(lab: Any, chunked: bool) -> None:
    body = json.dumps({"prompt": "x" * 3000, "stream": True}).encode()

    async def script(request: Any) -> None:
        request.write_json({"ok": True})

    async def scenario() -> None:
        async with lab.tap(script, inject=BOTH, max_body_bytes=2000) as (tap, upstream):
            if chunked:
                framed = [b"%x\r\n%b\r\n" % (len(body[at:][:500]), body[at:][:500]) for at in range(0, len(body), 500)]
                head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\n"
                await tap.send(head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(framed) + b"0\r\n\r\n")
            else:
                await tap.post(TEXT, body)
            assert upstream.requests[0].body == body
            assert bool(upstream.requests[0].values(b"transfer-encoding")) == chunked
            assert tap.relays.passed_by == {"request_larger_than_the_copy": 1}

    asyncio.run(scenario())
    [record] = lab.records
    assert not record.injected
    assert lab.counts.not_injected == 1


@pytest.mark.parametrize(
    ("status", "content_type", "body"),
    [
        (b"400 Bad Request", b"application/json", b'{"error":{"token_ids":[1]},"choices":[{"token_ids":[1]}]}'),
        (b"429 Too Many Requests", b"text/event-stream", b'data: {"choices":[],"usage":{"a":1}}\n\n'),
        (b"200 OK", b"text/plain", b'{"choices":[{"token_ids":[1]}]}'),
        (b"200 OK", b"application/json", b'{"choices":[{"token_ids":[1]}'),
        (b"200 OK", b"application/json", b""),
    ],
)
def test_errors_and_what_is_no_answer_pass_untouched(lab: Any, status: bytes, content_type: bytes, body: bytes) -> None:
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n" % (status, content_type, len(body))

    async def script(request: Any) -> None:
        request.write(head + b"\r\n" + body)

    async def scenario() -> None:
        async with lab.tap(script, inject=BOTH) as (tap, upstream):
            response = await tap.post(TEXT, REQUESTS[TEXT] | {"stream": True})
            assert response.raw == head + b"Connection: close\r\n\r\n" + body
            assert asked(upstream.requests[0]) == {"usage": True, "ids": True}

    asyncio.run(scenario())


def test_an_answer_compressed_all_the_same_passes_as_it_is_and_is_counted(lab: Any) -> None:
    packed = gzip.compress(vllm.whole_body(ANSWERS[TEXT], ids=True), mtime=0)

    async def script(request: Any) -> None:
        request.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n")
        request.write(b"Content-Length: %d\r\n\r\n%b" % (len(packed), packed))

    async def scenario() -> None:
        async with lab.tap(script, inject=BOTH) as (tap, _):
            response = await tap.post(TEXT, REQUESTS[TEXT])
            assert response.raw_body == packed
            assert tap.relays.passed_by == {"response_encoded": 1}

    asyncio.run(scenario())


def test_a_chunked_json_answer_is_cut_too_and_its_size_is_bounded(lab: Any) -> None:
    body = vllm.whole_body(ANSWERS[TEXT], ids=True)

    async def script(request: Any) -> None:
        request.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        for at in range(0, len(body), 100):
            request.write(b"%x\r\n%b\r\n" % (len(body[at : at + 100]), body[at : at + 100]))
            await asyncio.sleep(0.001)
        request.end_chunks()

    async def scenario(bound: int, expected: bytes, passed_by: dict[str, int]) -> None:
        async with lab.tap(script, inject=BOTH, max_body_bytes=bound, overwrite=True) as (tap, _):
            response = await tap.post(TEXT, REQUESTS[TEXT])
            assert unchunked(response.raw_body) == expected
            assert tap.relays.passed_by == passed_by

    asyncio.run(scenario(1 << 20, vllm.whole_body(ANSWERS[TEXT], ids=False), {}))
    asyncio.run(scenario(200, body, {"response_larger_than_the_copy": 1}))


def test_old_clients_and_servers_without_lengths_get_the_same_bytes(lab: Any) -> None:
    async def until_close(request: Any) -> None:
        request.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        request.write(b"".join(vllm.stream_events(ANSWERS[TEXT], **asked(request))))
        await request.writer.drain()
        request.writer.close()

    async def scenario(script: Script) -> None:
        async with lab.tap(script, inject=BOTH, overwrite=True) as (tap, _):
            body = json.dumps(REQUESTS[TEXT] | {"stream": True}).encode()
            for version in (b"1.0", b"1.1"):
                head = b"POST /v1/completions HTTP/%b\r\nHost: t\r\nConnection: close\r\n" % version
                response = await tap.send(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
                chunked = b"chunked" in response.head
                assert (unchunked(response.raw_body) if chunked else response.raw_body) == plain_stream(TEXT)
                assert chunked == (script is like_vllm and version == b"1.1")

    asyncio.run(scenario(like_vllm))
    asyncio.run(scenario(until_close))


def test_an_event_stream_of_known_length_gets_the_length_that_is_left(lab: Any) -> None:
    async def script(request: Any) -> None:
        stream = b"".join(vllm.stream_events(ANSWERS[TEXT], **asked(request)))
        request.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        request.write(b"Content-Length: %d\r\n\r\n%b" % (len(stream), stream))

    async def scenario() -> None:
        async with lab.tap(script, inject=BOTH) as (tap, _):
            response = await tap.post(TEXT, REQUESTS[TEXT] | {"stream": True})
            assert response.raw_body == plain_stream(TEXT)
            assert b"Content-Length: %d\r\n" % len(plain_stream(TEXT)) in response.head

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_an_upstream_that_dies_leaves_a_cut_response_and_no_half_event(lab: Any, stream: bool) -> None:
    async def script(request: Any) -> None:
        if stream:
            request.write_sse_head()
            events = b"".join(vllm.stream_events(ANSWERS[TEXT], **asked(request)))
            cut = events[: events.index(b"length") + 3]
            request.write(b"%x\r\n%b\r\n" % (len(cut), cut))
        else:
            request.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{")
        await request.writer.drain()
        await asyncio.sleep(0.01)
        request.writer.transport.abort()

    async def scenario() -> None:
        async with lab.tap(script, inject=BOTH) as (tap, _):
            response = await tap.post(TEXT, REQUESTS[TEXT] | {"stream": stream})
            assert response.status == 200
            if stream:
                [first, *_] = vllm.stream_events(ANSWERS[TEXT], usage=False, ids=False)
                assert response.raw_body == b"%x\r\n%b\r\n" % (len(first), first)
            else:
                assert b"Content-Length: 500" in response.head
                assert response.raw_body == b""

    asyncio.run(scenario())
    [record] = lab.records
    assert (record.status, record.error) == ("upstream_abort", "upstream_closed")


def test_a_client_that_leaves_before_its_request_is_whole_is_an_abort(lab: Any) -> None:
    async def scenario() -> None:
        async with lab.tap(like_vllm, inject=BOTH) as (tap, upstream):
            _, writer = await tap.connect()
            writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 50\r\n\r\n{"prompt":')
            await writer.drain()
            await until(lambda: tap.relays.in_flight == 1)
            writer.close()
            await until(lambda: tap.relays.in_flight == 0)
            assert upstream.connections == 0

    asyncio.run(scenario())
    [record] = lab.records
    assert (record.status, record.http_status) == ("client_abort", None)


def test_an_upstream_that_is_not_there_is_said_to_be(lab: Any, free_port: int) -> None:
    async def scenario() -> None:
        async with lab.tap(free_port, inject=BOTH) as (tap, _):
            response = await tap.post(TEXT, REQUESTS[TEXT])
            assert response.status == 502

    asyncio.run(scenario())
    [record] = lab.records
    assert (record.status, record.error) == ("error", "connect_refused")


def test_a_held_response_ends_its_upstreams_trouble(lab: Any) -> None:
    async def scenario() -> None:
        one, other = lab.upstream(like_vllm), lab.upstream(like_vllm)
        async with one.serving(), other.serving():
            origins = tuple(Origin("http", "127.0.0.1", upstream.port) for upstream in (one, other))
            async with lab.tap(one.port, inject=BOTH, upstreams=origins) as (tap, _):
                for upstream in tap.relays.upstreams.all:
                    upstream.ejection.fail(0.0)
                for _ in range(2):
                    await tap.post(TEXT, REQUESTS[TEXT])
                assert not any(upstream.ejection.troubled for upstream in tap.relays.upstreams.all)

    asyncio.run(scenario())


def test_upstreams_take_turns(lab: Any) -> None:
    async def scenario() -> None:
        one, other = lab.upstream(like_vllm), lab.upstream(like_vllm)
        async with one.serving(), other.serving():
            origins = tuple(Origin("http", "127.0.0.1", upstream.port) for upstream in (one, other))
            async with lab.tap(one.port, inject=BOTH, upstreams=origins) as (tap, _):
                for _ in range(4):
                    await tap.post(TEXT, REQUESTS[TEXT])
                assert (len(one.requests), len(other.requests)) == (2, 2)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("given", "learnt", "wanted", "complaint"),
    [
        (None, None, {"usage"}, "expected --dialect"),
        (None, "trtllm", {"usage"}, "--inject usage: trtllm refuses it"),
        (None, "llamacpp", BOTH, "--inject token-ids: llamacpp refuses it, or returns none"),
        ("trtllm", "vllm", {"token-ids"}, "trtllm refuses it"),
    ],
)
def test_an_engine_that_cannot_be_asked_or_told_apart_is_refused_at_start(
    lab: Any, given: DialectName | None, learnt: DialectName | None, wanted: set[str], complaint: str
) -> None:
    config = lab.config(1, inject=frozenset(wanted), dialect=given)
    with pytest.raises(InputError, match=complaint):
        check_injection(config, EngineFacts(dialect=learnt))


def test_what_is_learnt_of_the_engine_is_enough_to_inject(lab: Any) -> None:
    check_injection(lab.config(1, inject=BOTH, dialect=None), EngineFacts(dialect="sglang"))
    check_injection(lab.config(1, dialect=None), EngineFacts())  # nothing is to be added: any engine will do


def test_a_tap_that_injects_nothing_has_the_plain_relay(lab: Any) -> None:
    async def scenario(**settings: Any) -> str:
        async with lab.tap(like_vllm, overwrite=True, **settings) as (tap, _):
            return type(tap.relays).__name__

    assert asyncio.run(scenario()) == "Relays"
    assert asyncio.run(scenario(inject=frozenset({"usage"}))) == "InjectingRelays"


def test_what_is_added_is_the_reached_upstreams_as_it_is_known_then(lab: Any, free_port: int) -> None:
    """The first upstream is vLLM and refuses connections, the second is not known at first, and then SGLang."""

    async def scenario() -> list[dict[str, Any]]:
        async with lab.tap(like_vllm, inject=BOTH) as (tap, upstream):
            first, second = f"http://127.0.0.1:{free_port}", f"http://127.0.0.1:{upstream.port}"
            for dialect in (None, "sglang", "vllm"):
                entries = [UpstreamEntry(first, 0, dialect="vllm"), UpstreamEntry(second, 1, dialect=dialect)]
                tap.relays.upstreams.reload(entries)
                for kept in tap.relays.upstreams.all:
                    kept.ejection = Ejection(0)
                response = await tap.post(CHAT, {**REQUESTS[CHAT], "stream": True})
                assert response.status == 200
            return [json.loads(request.body) for request in upstream.requests]

    plain = {**REQUESTS[CHAT], "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    assert asyncio.run(scenario()) == [plain, {**plain, **usage}, {**plain, **usage, "return_token_ids": True}]
    assert [record.injected for record in lab.records] == [None, ["usage"], ["token-ids", "usage"]]


class PlainTensorRtLlm(TensorRtLlm):
    """One whose clients ask for text."""

    def render(self, body: Any, answers: Any, cached: int) -> Any:
        return StrictEngine.render(self, body, answers, cached)


ADDED: dict[str, list[str]] = {
    "vllm": ["return_token_ids", "stream_options"],
    "sglang": ["return_token_ids", "stream_options"],
}


def strict_body(name: str) -> dict[str, Any]:
    fields = DIALECTS[name].completion_fields("strict", 3, stream=True)  # type: ignore[index]
    unasked = ("stream_options", "return_token_ids", "detokenize")
    return {"prompt": list(range(20)), **{key: value for key, value in fields.items() if key not in unasked}}


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm", "openai"])
def test_auto_adds_what_each_engine_takes_and_its_client_sees_none_of_it(lab: Any, name: str) -> None:
    kind = PlainTensorRtLlm if name == "trtllm" else ENGINES[name]

    async def scenario(engine: StrictEngine) -> Any:
        async with lab.command(int(engine.url.rpartition(":")[2]), "--inject", "auto") as tap:
            response = await tap.post(TEXT, strict_body(name))
            await tap.end()
            return tap, response

    with kind().serving() as engine:
        tap, response = asyncio.run(scenario(engine))
    assert engine.refusals == []
    [seen] = engine.seen
    assert sorted(seen.keys() - strict_body(name).keys()) == ADDED.get(name, [])
    assert response.startswith(b"HTTP/1.1 200")
    assert b'"usage"' not in response
    assert (b'"token_ids": [' in response) == (name == "trtllm"), "that one's own are its own"
    notes = {
        "trtllm": "note: --inject auto asks for nothing: trtllm refuses unknown fields",
        "openai": "note: --inject auto asks for nothing: no engine is recognised, and some refuse unknown fields",
    }
    assert ("--inject" in tap.errors) == (name in notes)
    assert notes.get(name, "") in tap.errors
    assert (" · asks for token-ids and usage" in tap.output) == (name in ADDED)
    assert ("1 of 1 streams without usage" in tap.output) == (name not in ADDED)


def test_auto_in_a_fleet_of_two_engines_adds_to_the_requests_of_one(lab: Any) -> None:
    async def scenario(*engines: StrictEngine) -> None:
        urls = [flag for engine in engines for flag in ("--upstream", engine.url)]
        async with lab.command(0, *urls, "--inject", "auto") as tap:
            for _ in range(6):
                assert (await tap.post(TEXT, strict_body("vllm"))).startswith(b"HTTP/1.1 200")
            await tap.end()

    for order in ((ENGINES["vllm"], PlainTensorRtLlm), (PlainTensorRtLlm, ENGINES["vllm"])):
        lab.trace.unlink(missing_ok=True)
        with order[0]().serving() as one, order[1]().serving() as other:
            asyncio.run(scenario(one, other))
        for engine in (one, other):
            assert engine.refusals == []
            assert [len(body) > len(strict_body("vllm")) for body in engine.seen] == [engine.owner == "vllm"] * 3
        assert sorted(map(str, (record.injected for record in lab.records))) == [
            *["None"] * 3, *["['token-ids', 'usage']"] * 3
        ]  # fmt: skip


def test_without_inject_the_first_lines_say_what_that_costs(lab: Any) -> None:
    async def scenario(engine: StrictEngine) -> str:
        async with lab.command(int(engine.url.rpartition(":")[2])) as tap:
            await tap.end()
            return str(tap.errors)

    with ENGINES["vllm"]().serving() as engine:
        errors = asyncio.run(scenario(engine))
    assert (
        "tap: note: no --inject usage,token-ids: streams have no cached tokens and estimated lengths where clients do "
        "not ask for usage; the blocks of an output are known from the next turn alone; expected --inject auto\n"
    ) in errors


def test_a_body_whose_members_take_long_to_find_passes_as_it_came_and_is_counted(lab: Any) -> None:
    body = json.dumps({**REQUESTS[TEXT], **{f"{key}{'x' * 1000}": 1 for key in range(100)}}).encode()

    async def scenario() -> None:
        async with lab.tap(like_vllm, inject=BOTH) as (tap, upstream):
            assert (await tap.post(TEXT, body)).status == 200
            assert [request.body for request in upstream.requests] == [body]
            assert tap.relays.passed_by == {"request_unlocatable": 1}

    asyncio.run(scenario())
    assert (lab.counts.not_injected, lab.records[0].injected) == (1, None)
