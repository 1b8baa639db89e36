"""Mixed traffic whose every answer is known beforehand, so that a client can tell what a proxy did to it.

Users take turns: streams, unary requests, errors, streams that the engine loses and streams that the client leaves. An
answer that is not what the engine sent is a failure: another status, another body, a stream that was lost upstream and
ends as if it were whole.
"""

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from scripts.proxybench.engine import BUSY_BODY, unary_body
from scripts.timedclient import Client, Exchange
from wire.head import Headers, header_values
from wire.url import Origin

DONE = b"data: [DONE]\n\n"
PREFIXES = 8
PREFIX_TOKENS = 256
HEADERS = ((b"Content-Type", b"application/json"),)


@dataclass(slots=True)
class Tally:
    """Counts of requests sent, and of responses that differ from the engine's."""

    sent: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    """By kind of request and what was wrong."""

    @property
    def total(self) -> int:
        """Requests sent."""
        return self.sent.total()


class Traffic:
    """Users who each send one request after another until told to stop."""

    def __init__(
        self,
        port: int,
        *,
        users: int,
        text_prompts: bool = False,
        own_tokens: tuple[int, int] = (8, 200),
        think_s: float = 0.05,
        seed: int = 1,
        headers: Headers = (),
    ) -> None:
        self._client = Client(Origin("http", "127.0.0.1", port))
        self._users, self._text_prompts, self._own_tokens, self._think_s = users, text_prompts, own_tokens, think_s
        self._random = random.Random(seed)
        self._headers = (*HEADERS, *headers)
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.tally = Tally()

    def start(self) -> None:
        """Let the users begin."""
        self._tasks = [asyncio.create_task(self._user()) for _ in range(self._users)]

    async def stop(self) -> None:
        """Let every user finish the request in hand."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)
        await self._client.close()

    async def _user(self) -> None:
        kinds = (self._stream, self._unary, self._error, self._lost_stream, self._left_stream)
        while not self._stopping.is_set():
            [kind] = self._random.choices(kinds, weights=(40, 40, 8, 4, 8))
            await kind()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._random.expovariate(1 / self._think_s))

    async def _stream(self) -> None:
        chunks = self._random.randint(2, 40)
        exchange = await self._send("stream", f"stream&chunks={chunks}")
        body = body_of(exchange)
        self._expect("stream", exchange.outcome == "ok" and exchange.status == 200, describe(exchange))
        self._expect("stream", body.count(b"data: {") == chunks + 1 and body.endswith(DONE), "not the engine's events")

    async def _unary(self) -> None:
        prompt = self._prompt()
        exchange = await self._send("unary", "unary", prompt=prompt)
        self._expect("unary", exchange.outcome == "ok" and exchange.status == 200, describe(exchange))
        self._expect("unary", body_of(exchange) == unary_body(len(prompt)), "not the engine's body")

    async def _error(self) -> None:
        exchange = await self._send("error", "error")
        self._expect("error", exchange.outcome == "ok" and exchange.status == 429, describe(exchange))
        kept = header_values(exchange.headers, b"retry-after") == [b"1"] and body_of(exchange) == BUSY_BODY
        self._expect("error", kept, "not the engine's error")

    async def _lost_stream(self) -> None:
        chunks = self._random.randint(1, 10)
        exchange = await self._send("lost stream", f"cut&chunks={chunks}")
        self._expect("lost stream", exchange.outcome == "upstream_abort", f"ended {describe(exchange)}")

    async def _left_stream(self) -> None:
        """Leave once the first read has come."""
        exchange = Exchange()
        request = asyncio.create_task(self._send("left stream", "stream&chunks=400", exchange))
        while not exchange.reads and not request.done():  # noqa: ASYNC110  the client has no event for a read
            await asyncio.sleep(0.005)
        self._expect("left stream", bool(exchange.reads), describe(exchange))
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request

    async def _send(
        self, kind: str, answer: str, into: Exchange | None = None, prompt: list[int] | None = None
    ) -> Exchange:
        self.tally.sent[kind] += 1
        ids = prompt or self._prompt()
        said = " ".join(map(str, ids)) if self._text_prompts else ids
        body = msgspec.json.encode({"model": "m", "prompt": said, "max_tokens": 400, "stream": kind != "unary"})
        target = f"/v1/completions?answer={answer}&tokens={len(ids)}"
        return await self._client.request("POST", target, self._headers, body, into=into)

    def _prompt(self) -> list[int]:
        """Prompt of one of a few long prefixes, then tokens that no other request has."""
        beginning = 1000 * self._random.randrange(PREFIXES)
        own = memoryview(self._random.randbytes(2 * self._random.randint(*self._own_tokens))).cast("H")
        return [*range(beginning, beginning + PREFIX_TOKENS), *own]

    def _expect(self, kind: str, holds: bool, otherwise: str) -> None:
        if not holds:
            self.tally.failures[f"{kind}: {otherwise}"] += 1


def body_of(exchange: Exchange) -> bytes:
    """The whole body that came."""
    return b"".join(read.data for read in exchange.reads)


def describe(exchange: Exchange) -> str:
    """Describe a response in a word or two."""
    return f"{exchange.outcome} {exchange.error_kind or exchange.status or ''}".strip()
