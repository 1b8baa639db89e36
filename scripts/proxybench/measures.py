"""The measurements: each one proxy, one number or a few, over a window in which nothing else is asked of it."""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from scripts.proxybench.engine import Engine
from scripts.proxybench.processes import cpu_ns, pin, rss_mb
from scripts.proxybench.proxies import LOAD_CORE, Proxy
from scripts.proxybench.streams import (
    Floats,
    Prompt,
    StreamClient,
    WaitingClient,
    all_ended,
    latencies_us,
    open_streams,
    post,
)

UNEVEN_GAPS_MS = [(17 * step) % 39 + 1 for step in range(39)]
"""1 to 39 ms, 20 in the mean, in no order: what holds chunks back or joins them shows in the gaps."""
LARGE_PROMPT_BYTES = 400_000
WARM_REQUESTS = 5
SETTLE_S = 60.0
BEGIN_S = 20.0


def prompt_for(proxy: Proxy, prompt_bytes: int) -> Prompt:
    """A completion request of about that size, as token ids or text: whatever the proxy's recorder can hash."""
    tokens = prompt_bytes // 6
    prompt: object = [10_000 + number % 50_000 for number in range(tokens)]
    if not proxy.token_ids:
        prompt = "token " * tokens
    body = {"model": "m", "prompt": prompt, "max_tokens": 4096, "stream": True}
    return Prompt(json.dumps(body, separators=(",", ":")).encode(), tokens)


async def settled(proxy: Proxy) -> float:
    """Wait until the recorder has nothing left to do, so that no work of one window falls into the next; seconds."""
    started = time.monotonic()
    while proxy.recorder is not None and time.monotonic() - started < SETTLE_S:
        before = cpu_ns(proxy.recorder)
        await asyncio.sleep(0.1)
        if cpu_ns(proxy.recorder) - before < 4_000_000:
            break
    return time.monotonic() - started


@dataclass(frozen=True, slots=True)
class Window:
    """Work and cost of a proxy while streams passed."""

    latency_us: Floats
    chunks: int
    seconds: float
    cpu_us_per_chunk: float | None
    recorder_us_per_chunk: float | None
    rss_mb: float | None
    failures: int


async def stream_window(
    engine: Engine, proxy: Proxy, *, streams: int, gaps_ms: Sequence[int], warm_s: float, window_s: float
) -> Window:
    """Open streams, let them run in, count and clock a window of them, end them."""
    engine.gaps_ms = gaps_ms
    recorder_ns = total_ns(proxy.recorder)
    failed_before, sent_before = engine.failed, engine.sent
    engine.hold()
    clients = await open_streams(proxy.port, streams, prompt_for(proxy, 400))
    await all_begun(engine, streams)
    engine.let_go()
    await asyncio.sleep(warm_s)
    since_ns, sent, plane_ns = perf_counter_ns(), engine.sent, total_ns(proxy.pid)
    await asyncio.sleep(window_s)
    until_ns, chunks, plane_ns = perf_counter_ns(), engine.sent - sent, total_ns(proxy.pid) - plane_ns
    memory = rss_mb(proxy.pid) if proxy.pid is not None else None
    all_chunks = engine.sent - sent_before
    engine.end_streams()
    failures = await all_ended(clients, 10.0) + engine.failed - failed_before
    await settled(proxy)
    return Window(
        latency_us=latencies_us(clients, since_ns, until_ns),
        chunks=chunks,
        seconds=(until_ns - since_ns) / 1e9,
        cpu_us_per_chunk=per(plane_ns, chunks) if proxy.pid is not None else None,
        recorder_us_per_chunk=per(total_ns(proxy.recorder) - recorder_ns, all_chunks) if proxy.recorder else None,
        rss_mb=memory,
        failures=failures + missing(clients, all_chunks),
    )


async def all_begun(engine: Engine, streams: int) -> None:
    """Wait until every request has reached the engine, for as long as any proxy could need."""
    deadline = time.monotonic() + BEGIN_S
    while len(engine.streams) < streams and time.monotonic() < deadline:  # noqa: ASYNC110  no hot path for this
        await asyncio.sleep(0.01)


def missing(clients: Sequence[StreamClient], sent: int) -> int:
    """Number of sent chunks that no client read."""
    return sent - len(latencies_us(clients, 0, perf_counter_ns()))


async def first_tokens(proxy: Proxy, count: int, prompt_bytes: int, pause_s: float) -> list[float]:
    """TTFT of requests one after another on one connection, µs; the pause lets a recorder finish the one before."""
    request, client = post(prompt_for(proxy, prompt_bytes), "first"), WaitingClient()
    await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", proxy.port)
    for _ in range(WARM_REQUESTS):
        await client.wait_us(request)
    times = []
    for _ in range(count):
        await asyncio.sleep(pause_s)
        times.append(await client.wait_us(request))
    client.close()
    await settled(proxy)
    return times


def total_ns(pid: int | None) -> int:
    """CPU time of a process that may not be there."""
    return 0 if pid is None else cpu_ns(pid)


def per(nanoseconds: int, count: int) -> float:
    """Microseconds each."""
    return nanoseconds / 1e3 / max(count, 1)


def pin_to_load_core() -> None:
    """Keep this process, the upstream and the client, off the proxies' core."""
    pin(os.getpid(), LOAD_CORE)
