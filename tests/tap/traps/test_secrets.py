"""Nothing of what was said, and nothing that lets anybody in, is in a file, an output, a page or a process's arguments.

Every place where a secret can stand holds one of its own, all with one mark; then everything that a running tap leaves
or shows is searched for the mark.
"""

import asyncio
import contextlib
import itertools
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from tests.fakes.vocabularies import write_model

MARK = "KANARIE"
ADMIN_PAGES = ("/", "/metrics", "/healthz", "/readyz")


def planted() -> Iterator[str]:
    """Ever new secrets."""
    for number in itertools.count():
        yield f"{MARK}{number:03}"


SECRETS = planted()


def secret() -> str:
    return next(SECRETS)


def secret_headers() -> bytes:
    names = ("Authorization", "Proxy-Authorization", "Cookie", "X-Api-Key", "api-key", "X-Session-ID", "X-Request-Id")
    more = ("User-Agent", "X-Forwarded-For", "OpenAI-Organization", "X-Goog-Api-Key", "Referer", "traceparent")
    return "".join(f"{name}: {secret()}\r\n" for name in (*names, *more)).encode()


def bodies() -> dict[str, Any]:
    """A request for every API, each with secrets wherever text may stand."""
    tool = {"type": "function", "function": {"name": secret(), "description": secret(), "parameters": {}}}
    printed = [
        {"role": "system", "content": secret()},
        {"role": "user", "name": secret(), "content": [{"type": "text", "text": secret()}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{secret()}"}}]},
        {"role": "assistant", "tool_calls": [{"id": secret(), "function": {"name": "f", "arguments": secret()}}]},
        {"role": "tool", "tool_call_id": secret(), "content": secret()},
    ]
    common = {"model": "m", "user": secret(), "metadata": {"session_id": secret(), "note": secret()}}
    return {
        "/v1/completions": {**common, "prompt": [secret() * 9, secret()], "suffix": secret(), "stop": [secret()]},
        "/v1/chat/completions": {**common, "messages": printed, "tools": [tool], "stream": True, "logit_bias": {}},
        "/v1/responses": {**common, "input": secret(), "instructions": secret(), "previous_response_id": secret()},
        "/v1/messages": {**common, "messages": printed[1:2], "system": secret(), "max_tokens": 5},
        "/v1/embeddings": {**common, "input": [secret(), secret()]},
        f"/v1/{secret()}/rerank?query={secret()}": {**common, "documents": [secret()]},
        f"/v1/users/{MARK.lower()}/chat": {**common, "model": f"\x1b{secret()}"},
        f"/v1/completions?api_key={secret()}#{secret()}": {"prompt": secret()},
    }


async def answer(request: Any) -> None:
    """An error, nonsense, or an answer with secrets in every text of it."""
    if b"x-fail" in request.head.lower():
        request.write_json({"error": {"message": secret(), "type": secret(), "code": secret()}}, b"400 Bad")
    elif b"x-nonsense" in request.head.lower():
        request.write(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\nX: %b\r\n\r\n" % secret().encode())
    elif b"/chat/" in request.target:
        request.write_sse_head()
        delta = {"content": secret(), "reasoning_content": secret(), "tool_calls": [{"id": secret()}]}
        await request.write_event({"id": secret(), "choices": [{"index": 0, "delta": delta}]})
        await request.write_event({"error": {"message": secret(), "type": secret()}})
        request.end_chunks()
    else:
        choice = {"index": 0, "text": secret(), "finish_reason": secret()}
        usage = {"prompt_tokens": 9, "completion_tokens": 3}
        request.write_json({"id": secret(), "choices": [choice], "content": [{"text": secret()}], "usage": usage})


async def send_raw(port: int, *lines: bytes) -> None:
    """A request that the tap refuses, with secrets in what it refuses."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + secret().encode())
    await reader.read()
    writer.close()


def shown_by(pids: list[int]) -> bytes:
    """Arguments and environment of processes: whoever is on the machine may read the first."""
    actual = b""
    for pid in pids:
        for part in ("cmdline", "environ"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                actual += Path(f"/proc/{pid}/{part}").read_bytes()
    return actual


@contextlib.asynccontextmanager
async def upstream_of(lab: Any) -> AsyncIterator[int]:
    upstream = lab.upstream(answer)
    async with upstream.serving():
        yield upstream.port


def get(port: int, path: str) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}?x={secret()}")
    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request, timeout=30) as page:
        return bytes(page.read())
    return b""


def test_secrets_are_never_stored(lab: Any) -> None:
    model = write_model("deepseek", lab.trace.parent / "model")
    flags = ("--tokenizer", str(model), "--no-engine-facts", "--admin", "127.0.0.1:0", "--inject", "usage")
    remaining = ("--dialect", "vllm", "--keep-header", "X-Team", "--rotate-mb", "1")

    async def scenario() -> None:
        async with upstream_of(lab) as port, lab.command(port, *flags, *remaining, warm=False) as tap:
            [admin] = map(int, re.findall(r"admin pages on http://127\.0\.0\.1:(\d+)", tap.output))
            for extra in (b"", b"X-Fail: 1\r\n", b"X-Nonsense: 1\r\n"):
                for path, body in bodies().items():
                    await tap.post(path, body, secret_headers() + b"X-Team: blue\r\n" + extra)
            await tap.post("/v1/completions", f"{secret()} is no object", secret_headers())
            host, authorization = b"Host: t", b"Authorization: " + secret().encode()
            await send_raw(tap.port, b"GET /" + secret().encode() + b" HTTP/1.1", host, authorization, b"Bad : header")
            await send_raw(
                tap.port, b"GET / HTTP/1.1", host, authorization, b"Upgrade: websocket", b"Connection: upgrade"
            )
            await send_raw(tap.port, secret().encode(), host)
            processes = [
                tap.process.pid,
                *tap.pids("tap.proxy.worker"),
                *tap.pids("tap.recorder.recorder"),
            ]
            assert len(processes) == 3
            shown = shown_by(processes)
            pages = [await asyncio.to_thread(get, admin, page) for page in ADMIN_PAGES]
            assert b"kvtape" in b"".join(pages)
            await tap.end()
            assert tap.code == 0, tap.errors
            files = [path for path in lab.folder.rglob("*") if path.is_file()]
            written = b"".join(path.read_bytes() for path in files)
            assert written.count(b'"endpoint"') >= 20
            assert b'"blue"' in written, "what was asked to be kept is"
            for index, actual in {
                "a file": written,
                "a file's name": "".join(map(str, files)).encode(),
                "the output": (tap.output + tap.errors).encode(),
                "an admin page": b"".join(pages),
                "a process's arguments": shown,
            }.items():
                where = actual.upper().find(MARK.encode())
                assert where < 0, f"{index} has {actual[max(0, where - 80) : where + 20]!r}"
            assert (lab.folder / "keys" / "key").read_bytes().strip() not in shown

    asyncio.run(scenario())
