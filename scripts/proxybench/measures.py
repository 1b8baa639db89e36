"""The measurements: each one proxy, one number or a few, over a window in which nothing else is asked of it."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter_ns

from scripts.proxybench.engine import Engine
from scripts.proxybench.processes import cpu_ns, pin, rss_mb
from scripts.proxybench.proxies import LOAD_CORE, Proxy
from scripts.proxybench.streams import (
    Arrivals,
    Prompt,
    StreamClient,
    WaitingClient,
    all_ended,
    arrivals,
    open_streams,
    post,
    target,
)

UNEVEN_GAPS_MS = [(17 * step) % 39 + 1 for step in range(39)]
"""1 to 39 ms, 20 in the mean, in no order: what holds chunks back or joins them shows in the gaps."""
IDLE_GAP_MS = 2000
LARGE_PROMPT_BYTES = 400_000
UNARY_PAUSES_S = (0.001, 0.003, 0.002, 0.0, 0.004)
LARGE_PAUSE_S = 0.03
WARM_REQUESTS = 5
SETTLE_S = 60.0
CONNECTIONS = 64
BEGIN_S = 20.0


def prompt_for(proxy: Proxy, prompt_bytes: int, *, stream: bool = True) -> Prompt:
    """A completion request of about that size, as token ids or text: whatever the proxy's recorder can hash."""
    tokens = prompt_bytes // 6
    prompt: object = [10_000 + number % 50_000 for number in range(tokens)]
    if not proxy.token_ids:
        prompt = "token " * tokens
    body = {"model": "m", "prompt": prompt, "max_tokens": 4096, "stream": stream}
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

    arrivals: Arrivals
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
    seen = arrivals(clients, since_ns, until_ns)
    return Window(
        arrivals=seen,
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
    everything = arrivals(clients, 0, perf_counter_ns())
    return sent - len(everything.latency_us)


async def first_tokens(proxy: Proxy, count: int, prompt_bytes: int, pause_s: float) -> list[float]:
    """TTFT of requests one after another on one connection, µs; the pause lets a recorder finish the one before."""
    request = post(prompt_for(proxy, prompt_bytes), "first")
    times = await waits(proxy, WaitingClient(), request, count, [pause_s])
    await settled(proxy)
    return times


async def unary_waits(proxy: Proxy, count: int) -> list[float]:
    """Waits for unary responses, µs, beside another client's large prompts, which keep a recorder at work."""
    stop = asyncio.Event()
    beside = asyncio.create_task(_send_large_prompts(proxy, stop))
    request = post(prompt_for(proxy, 400, stream=False), "unary")
    times = await waits(proxy, WaitingClient(b"HTTP/1.1 200", b"}}"), request, count, UNARY_PAUSES_S)
    stop.set()
    await beside
    await settled(proxy)
    return times


async def _send_large_prompts(proxy: Proxy, stop: asyncio.Event) -> None:
    client, request = WaitingClient(), post(prompt_for(proxy, LARGE_PROMPT_BYTES), "first")
    await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", proxy.port)
    while not stop.is_set():
        await client.wait_us(request)
        await asyncio.sleep(LARGE_PAUSE_S)
    client.close()


async def waits(
    proxy: Proxy, client: WaitingClient, request: bytes, count: int, pauses_s: Sequence[float]
) -> list[float]:
    """Waits of requests one after another on one connection, µs."""
    await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", proxy.port)
    for _ in range(WARM_REQUESTS):
        await client.wait_us(request)
    times = []
    for pause_s in islice(cycle(pauses_s), count):
        await asyncio.sleep(pause_s)
        times.append(await client.wait_us(request))
    client.close()
    return times


@dataclass(frozen=True, slots=True)
class Saturation:
    """Unary requests as fast as they go."""

    rate: float
    """Answered a second."""
    failures: int
    cpu_us: float | None
    """Of the data plane, a request."""
    recorder_cpu_us: float | None
    recorded_rate: float | None
    """Records in the file a second, from the first request until the recorder had written the last."""


WRK = r"""
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = [==[{body}]==]
"""


async def saturate(engine: Engine, proxy: Proxy, folder: Path, seconds: float) -> Saturation | None:
    """``wrk`` on the load's core, beside the upstream; null where there is no wrk."""
    path = shutil.which("wrk")
    if path is None:
        return None
    script = folder / "unary.lua"
    prompt = prompt_for(proxy, 400, stream=False)
    script.write_text(WRK.format(body=prompt.body.decode()))
    answered, records = engine.unary, records_of(proxy)
    plane_ns, recorder_ns, started = total_ns(proxy.pid), total_ns(proxy.recorder), time.monotonic()
    command = [path, "-t1", f"-c{CONNECTIONS}", f"-d{seconds:g}s", "-s", str(script)]
    process = await asyncio.create_subprocess_exec(
        *command, f"http://127.0.0.1:{proxy.port}{target(prompt, 'unary')}", stdout=subprocess.PIPE
    )
    pin(process.pid, LOAD_CORE)
    said = (await process.communicate())[0].decode()
    plane_ns = total_ns(proxy.pid) - plane_ns
    requests = engine.unary - answered
    recorded, written_at = await written(proxy, records + requests)
    took = written_at - started
    await settled(proxy)
    return Saturation(
        rate=float(re.findall(r"Requests/sec:\s+([\d.]+)", said)[0]),
        failures=sum(
            int(number)
            for number in re.findall(r"(?:Non-2xx or 3xx responses:|connect|read|write|timeout) (\d+)", said)
        ),
        cpu_us=per(plane_ns, requests) if proxy.pid is not None else None,
        recorder_cpu_us=per(total_ns(proxy.recorder) - recorder_ns, requests) if proxy.recorder else None,
        recorded_rate=(recorded - records) / took if proxy.records else None,
    )


async def written(proxy: Proxy, expected: int) -> tuple[int, float]:
    """Wait for that many records in the trace, or until it grows no more; how many and when."""
    records, at = records_of(proxy), time.monotonic()
    while proxy.records is not None and records < expected and time.monotonic() - at < 3.0:
        await asyncio.sleep(0.1)
        now = records_of(proxy)
        if now > records:
            records, at = now, time.monotonic()
    return records, at


def records_of(proxy: Proxy) -> int:
    """Records in the proxy's trace so far."""
    return 0 if proxy.records is None else proxy.records.count()


def total_ns(pid: int | None) -> int:
    """CPU time of a process that may not be there."""
    return 0 if pid is None else cpu_ns(pid)


def per(nanoseconds: int, count: int) -> float:
    """Microseconds each."""
    return nanoseconds / 1e3 / max(count, 1)


def pin_to_load_core() -> None:
    """Keep this process, the upstream and the client, off the proxies' core."""
    pin(os.getpid(), LOAD_CORE)
