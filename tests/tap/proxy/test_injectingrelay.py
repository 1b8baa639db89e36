"""Injection over real sockets: the client sees what it would have seen, the recorder sees what was asked for."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engines.detection import DIALECTS
from engines.dialect import DialectName
from engines.facts import EngineFacts
from tap.ipc.messages import UpstreamEntry
from tap.proxy.ejection import Ejection
from tap.supervisor.startup import check_injection
from tests.fakes.strict_engines import ENGINES, StrictEngine, TensorRtLlm
from tests.tap.proxy import vllm_rendering as vllm
from tracefile.records.errors import InputError

Script = Callable[[Any], Awaitable[None]]
BOTH = frozenset({"usage", "token-ids"})

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ADDITIONS = b',"return_token_ids":true,"stream_options":{"include_usage":true}'
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


def requested(request: Any) -> dict[str, bool]:
    """What a request asks vLLM for, as vLLM reads it."""
    fields = json.loads(request.body)
    return {
        "usage": bool((fields.get("stream_options") or {}).get("include_usage")),
        "ids": bool(fields.get("return_token_ids")),
    }


def endpoint_of(request: Any) -> str:
    return CHAT if b"chat" in request.target else TEXT


async def like_vllm(request: Any) -> None:
    """Responds to streams with one event per chunk, to other requests with Content-Length."""
    answer, wants = ANSWERS[endpoint_of(request)], requested(request)
    if json.loads(request.body).get("stream"):
        request.write_sse_head()
        for event in vllm.stream_events(answer, **wants):
            request.write(b"%x\r\n%b\r\n" % (len(event), event))
            await request.writer.drain()
            await asyncio.sleep(0)
        request.end_chunks()
    else:
        body = vllm.full_body(answer, ids=wants["ids"])
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
def test_client_stream_is_unchanged_and_record_has_usage_and_token_ids(lab: Any, path: str, wanted: set[str]) -> None:
    async def scenario() -> None:
        async with lab.tap(like_vllm, inject=frozenset(wanted)) as (tap, upstream):
            response = await tap.post(path, REQUESTS[path] | {"stream": True})
            assert requested(upstream.requests[0]) == {"usage": "usage" in wanted, "ids": "token-ids" in wanted}
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


def test_injected_request_has_content_length_and_identity_coding(lab: Any) -> None:
    async def scenario() -> None:
        async with lab.tap(like_vllm, inject=BOTH) as (tap, upstream):
            body = json.dumps(REQUESTS[TEXT] | {"stream": True}).encode()
            chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (1, body[at : at + 1]) for at in range(len(body)))
            response = await tap.send(
                b"POST /v1/completions?q HTTP/1.1\r\nHost: t\r\nX-1: a\r\nTransfer-Encoding: chunked\r\n"
                b"Trailer: X-T\r\nAccept-Encoding: gzip, br\r\nConnection: close\r\n\r\n%b0\r\nX-T: 1\r\n\r\n" % chunks
            )
            assert response.status == 200
            sent = upstream.requests[0]
            assert sent.head == (
                b"POST /v1/completions?q HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nX-1: a\r\nAccept-Encoding: identity\r\n"
                b"Content-Length: %d\r\n\r\n" % (upstream.port, len(body) + len(ADDITIONS))
            )
            assert sent.body == body[:-1] + ADDITIONS + b"}"

    asyncio.run(scenario())


def test_client_requested_fields_are_relayed_unchanged(lab: Any) -> None:
    fields = REQUESTS[CHAT] | {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    raw_request = json.dumps(fields).encode()
    written: list[bytes] = []

    async def script(request: Any) -> None:
        events = vllm.stream_events(ANSWERS[CHAT], **requested(request))
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
def test_signed_or_encoded_body_is_unchanged(lab: Any, headers: bytes, reason: str) -> None:
    body = json.dumps(REQUESTS[TEXT] | {"stream": True}).encode()
    sent = gzip.compress(body, mtime=0) if reason == "request_encoded" else body

    async def script(request: Any) -> None:
        request.write_json({"ok": True})

    async def scenario() -> None:
        async with lab.tap(script, inject=BOTH) as (tap, upstream):
            await tap.post(TEXT, sent, headers)
            assert upstream.requests[0].body == sent
            assert tap.relays.skipped == {reason: 1}

    asyncio.run(scenario())
    assert not lab.records[0].injected


@pytest.mark.parametrize("chunked", [False, True])
def test_body_beyond_the_capture_limit_is_unchanged(lab: Any, chunked: bool) -> None:
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
            assert tap.relays.skipped == {"request_larger_than_the_copy": 1}

    asyncio.run(scenario())
    [record] = lab.records
    assert not record.injected
    assert lab.counts.not_injected == 1


@pytest.mark.parametrize(
    ("status", "content_type", "body"),
    [
        (b"400 Bad Request", b"application/json", b'{"error":{"token_ids":[1]},"choices":[{"token_ids":[1]}]}'),
        (b"429 Too Many Requests", b"text/event-stream", b'data: {"choices":[],"usage":{"a":1}}\n\n'),
        (b"200 OK", b"application/json", b'{"choices":[{"token_ids":[1]}'),
    ],
)
def test_errors_and_non_streams_are_unchanged(lab: Any, status: bytes, content_type: bytes, body: bytes) -> None:
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n" % (status, content_type, len(body))

    async def script(request: Any) -> None:
        request.write(head + b"\r\n" + body)

    async def scenario() -> None:
        async with lab.tap(script, inject=BOTH) as (tap, upstream):
            response = await tap.post(TEXT, REQUESTS[TEXT] | {"stream": True})
            assert response.raw == head + b"Connection: close\r\n\r\n" + body
            assert requested(upstream.requests[0]) == {"usage": True, "ids": True}

    asyncio.run(scenario())


def test_compressed_response_is_unchanged_and_counted(lab: Any) -> None:
    packed = gzip.compress(b"".join(vllm.stream_events(ANSWERS[TEXT], usage=True, ids=True)), mtime=0)

    async def script(request: Any) -> None:
        request.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n")
        request.write(b"Content-Length: %d\r\n\r\n%b" % (len(packed), packed))

    async def scenario() -> None:
        async with lab.tap(script, inject=BOTH) as (tap, _):
            response = await tap.post(TEXT, REQUESTS[TEXT] | {"stream": True})
            assert response.raw_body == packed
            assert tap.relays.skipped == {"response_encoded": 1}

    asyncio.run(scenario())


def test_event_stream_with_content_length_is_chunked(lab: Any) -> None:
    async def script(request: Any) -> None:
        stream = b"".join(vllm.stream_events(ANSWERS[TEXT], **requested(request)))
        request.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        request.write(b"Content-Length: %d\r\n\r\n%b" % (len(stream), stream))

    async def scenario() -> None:
        async with lab.tap(script, inject=BOTH) as (tap, _):
            response = await tap.post(TEXT, REQUESTS[TEXT] | {"stream": True})
            assert unchunked(response.raw_body) == plain_stream(TEXT)
            assert b"Content-Length" not in response.head

    asyncio.run(scenario())


def test_lost_upstream_leaves_no_partial_event(lab: Any) -> None:
    async def script(request: Any) -> None:
        request.write_sse_head()
        events = b"".join(vllm.stream_events(ANSWERS[TEXT], **requested(request)))
        cut = events[: events.index(b"length") + 3]
        request.write(b"%x\r\n%b\r\n" % (len(cut), cut))
        await request.writer.drain()
        await asyncio.sleep(0.01)
        request.writer.transport.abort()

    async def scenario() -> None:
        async with lab.tap(script, inject=BOTH) as (tap, _):
            response = await tap.post(TEXT, REQUESTS[TEXT] | {"stream": True})
            [first, *_] = vllm.stream_events(ANSWERS[TEXT], usage=False, ids=False)
            assert response.raw_body == b"%x\r\n%b\r\n" % (len(first), first)

    asyncio.run(scenario())
    [record] = lab.records
    assert (record.status, record.error) == ("upstream_abort", "upstream_closed")


@pytest.mark.parametrize(
    ("given", "learnt", "wanted", "complaint"),
    [
        (None, None, {"usage"}, "expected --dialect"),
        (None, "llamacpp", BOTH, "--inject token-ids,usage: not supported by llamacpp"),
    ],
)
def test_injection_unsupported_by_the_engine_is_refused_at_start(
    lab: Any, given: DialectName | None, learnt: DialectName | None, wanted: set[str], complaint: str
) -> None:
    config = lab.config(1, inject=frozenset(wanted), dialect=given)
    with pytest.raises(InputError, match=complaint):
        check_injection(config, EngineFacts(dialect=learnt))


def test_injection_follows_the_dialect_of_the_connected_upstream(lab: Any, free_port: int) -> None:
    """The first upstream is vLLM and refuses connections, the second is not known at first, and then SGLang."""

    async def scenario() -> list[dict[str, Any]]:
        async with lab.tap(like_vllm, inject=BOTH) as (tap, upstream):
            first, second = f"http://127.0.0.1:{free_port}", f"http://127.0.0.1:{upstream.port}"
            for dialect in (None, "sglang", "vllm"):
                entries = [UpstreamEntry(first, 0, dialect="vllm"), UpstreamEntry(second, 1, dialect=dialect)]
                tap.relays.upstreams.reload(entries)
                for remaining in tap.relays.upstreams.all:
                    remaining.ejection = Ejection(0)
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
    "sglang": ["stream_options"],
}


def strict_body(name: str) -> dict[str, Any]:
    fields = DIALECTS[name].completion_fields("strict", 3, stream=True)  # type: ignore[index]
    unasked = ("stream_options", "return_token_ids", "detokenize")
    return {"prompt": list(range(20)), **{key: value for key, value in fields.items() if key not in unasked}}


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm", "openai"])
def test_inject_auto_by_dialect_is_transparent_to_clients(lab: Any, name: str) -> None:
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
    assert (b'"token_ids": [' in response) == (name in ("trtllm", "sglang")), "their own are their own"
    notes = {
        "trtllm": "note: --inject auto injects nothing: not supported by trtllm",
        "openai": "note: --inject auto injects nothing: engine not detected; expected --dialect NAME",
    }
    assert ("--inject" in tap.errors) == (name in notes)
    assert notes.get(name, "") in tap.errors
    assert (" · injects " in tap.output) == (name in ADDED)
