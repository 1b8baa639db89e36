"""An OpenAI-compatible engine that does as a test says, over a real socket, with an oracle for its prefix cache.

A prompt's blocks are in the cache once the prompt has arrived, the blocks that an output fills once it has ended.
"""

import asyncio
import contextlib
import json
import random
import ssl
import threading
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.prefix_cache import PrefixCache

Json = dict[str, Any]


@dataclass
class ScriptedEngine:
    """What it does, and what it saw. Attributes may be changed between requests."""

    block_size: int = 16
    first_token_s: float = 0.0
    vocabulary: int = 150_000
    context: int = 1 << 20
    seed: int = 0
    returns_ids: bool = True
    reports_cached: bool = True
    has_reset: bool = True
    running: int = 0
    waiting: int = 0
    """Load of others, by its metrics."""
    stalls: bool = False
    """Streams a first token and then nothing."""
    statuses: dict[int, int] = field(default_factory=dict)
    """HTTP status of the nth completion request, from 0; others are answered."""
    cuts: set[int] = field(default_factory=set)
    """Completion requests whose connection is cut after the first token."""
    authorization: str | None = None
    """Requests without this header get 401, with what they said instead; null: all are answered."""
    tls: ssl.SSLContext | None = None
    """Null: plain HTTP."""
    answer: Sequence[int] | None = None
    """The ids of every answer, repeated as long as needed; null: drawn at random."""

    base_path: str = ""
    prints: str = ""
    """Stands in every output, every error body and a cookie."""
    seen: list[Json] = field(default_factory=list)
    """Bodies of completion requests, in order of arrival."""
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.cache = PrefixCache(self.block_size)

    def generate(self, count: int) -> list[int]:
        if self.answer is not None:
            return [self.answer[index % len(self.answer)] for index in range(count)]
        return [self.random.randrange(self.vocabulary) for _ in range(count)]

    @contextlib.contextmanager
    def serving(self) -> Iterator["ScriptedEngine"]:
        """Serve from a thread of its own for the length of the block."""
        loop = asyncio.new_event_loop()
        started = threading.Event()

        async def main() -> None:
            self._stop = asyncio.Event()
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0, ssl=self.tls)
            scheme = "http" if self.tls is None else "https"
            self.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            started.set()
            await self._stop.wait()
            server.close()
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
        thread.start()
        started.wait()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(self._stop.set)
            thread.join()
            loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._exchange(reader, writer):
                pass
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.paths.append(f"{method} {path}")
        stderr = headers.get("authorization")
        if self.authorization not in (None, stderr):
            writer.write(self._response(401, {"error": f"wrong key: {stderr}"}))
            return True
        path = path.removeprefix(self.base_path)
        if path in {"/v1/completions", "/v1/chat/completions"}:
            self.headers.append(headers)
            return await self._watched(reader, self._complete(path, json.loads(body), writer))
        status, answer = self._control(method, path)
        writer.write(_response(status, answer, self.prints))
        await writer.drain()
        return True

    def _response(self, status: int, value: Json) -> bytes:
        return _response(status, json.dumps(value).encode(), self.prints)

    async def _watched(self, reader: asyncio.StreamReader, answering: Coroutine[Any, Any, bool]) -> bool:
        """The answer, unless the client goes away first."""
        task = asyncio.ensure_future(answering)
        while not task.done():
            await asyncio.wait([task], timeout=0.005)
            if reader.at_eof():
                task.cancel()
                return False
        return task.result()

    def _control(self, method: str, path: str) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "scripted"}]}).encode()
        if path == "/version":
            return 200, b'{"version":"9.9"}'
        if path == "/metrics":
            return 200, (
                f'vllm:cache_config_info{{block_size="{self.block_size}",num_gpu_blocks="512",'
                f'enable_prefix_caching="True",engine="0"}} 1.0\n'
                f'vllm:prefix_cache_queries_total{{engine="0"}} {self.cache.queries}.0\n'
                f'vllm:prefix_cache_hits_total{{engine="0"}} {self.cache.hits}.0\n'
                f"vllm:num_requests_running {self.running}\nvllm:num_requests_waiting {self.waiting}\n"
            ).encode()
        if path == "/reset_prefix_cache" and self.has_reset:
            if method == "GET":
                return 405, b"{}"
            self.cache.clear()
            return 200, b""
        return 404, b"{}"

    async def _complete(self, path: str, body: Json, writer: asyncio.StreamWriter) -> bool:
        number = len(self.seen)
        self.seen.append(body)
        prompt = self._prompt(path, body)
        status = self.statuses.get(number, 200)
        if max(prompt) >= self.vocabulary or len(prompt) + body["max_tokens"] > self.context:
            status = 400
        if status != 200:
            writer.write(self._response(status, {"error": {"message": f"as the script says {self.prints}"}}))
            return True
        cached = self.cache.look_up(prompt)
        self.cache.fill(prompt)
        answer = self.generate(body["max_tokens"])
        usage = self._usage(len(prompt), len(answer), cached)
        await asyncio.sleep(self.first_token_s)
        if body.get("stream"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for index, token in enumerate(answer):
                extra = {"prompt_token_ids": prompt} if index == 0 else {}
                _event(writer, {"choices": [self._choice(path, token, index == len(answer) - 1) | extra]})
                await writer.drain()
                if number in self.cuts:
                    writer.transport.abort()
                    return False
                if self.stalls:
                    await asyncio.sleep(60)
            _event(writer, {"choices": [], "usage": usage})
            # Before the client can know of the end: its next turn must find what this one left.
            self.cache.fill([*prompt, *answer[:-1]])
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            self.cache.fill([*prompt, *answer[:-1]])
            text = "x" * len(answer) + self.prints
            choice = {"index": 0, "text": text, "finish_reason": "length", "token_ids": answer}
            writer.write(self._response(200, {"choices": [choice], "usage": usage}))
        await writer.drain()
        return True

    def _prompt(self, path: str, body: Json) -> list[int]:
        if path == "/v1/completions":
            return list(body["prompt"])
        stderr = " ".join(message["role"] + " " + message["content"] for message in body["messages"])
        return [sum(word.encode()) for word in stderr.split()]

    def _choice(self, path: str, token: int, last: bool) -> Json:
        text = f"t{token} {self.prints}"
        stderr = {"text": text} if path == "/v1/completions" else {"delta": {"content": text}}
        ids = {"token_ids": [token]} if self.returns_ids else {}
        return {"index": 0, "finish_reason": "length" if last else None, **stderr, **ids}

    def _usage(self, prompt: int, output: int, cached: int) -> Json:
        details = {"cached_tokens": cached} if self.reports_cached else None
        return {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}


def _event(writer: asyncio.StreamWriter, event: Json) -> None:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _response(status: int, body: bytes, cookie: str = "") -> bytes:
    headers = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return (headers + (f"Set-Cookie: {cookie}\r\n" if cookie else "") + "\r\n").encode() + body
