"""Load client with aiohttp: one session, streamed responses, a line per request."""

import asyncio
import time
from typing import Any, TextIO

import aiohttp
import msgspec

from scripts.loadbench.clientload import ClientLoad, keep, read_load
from wire.loop import run

decode = msgspec.json.Decoder().decode


async def send(session: aiohttp.ClientSession, url: str, body: bytes, number: int, out: TextIO) -> None:
    headers = {"Content-Type": "application/json", "X-Request-Id": f"r{number}"}
    read_ns: list[int] = []
    partial = b""
    sent_ns = time.perf_counter_ns()
    async with session.post(url, data=body, headers=headers) as response:
        response.raise_for_status()
        async for data in response.content.iter_any():
            at_ns = time.perf_counter_ns()
            *events, partial = (partial + data).split(b"\n\n")
            if sum(map(tokens_of, events)):
                read_ns.append(at_ns)
    keep(out, f"r{number}", sent_ns, read_ns)


def tokens_of(event: bytes) -> int:
    """Count the tokens in an event."""
    data = event.removeprefix(b"data: ")
    if data == b"[DONE]":
        return 0
    decoded: dict[str, Any] = decode(data)
    return sum(len(choice["token_ids"]) for choice in decoded["choices"])


async def closed_loop(session: aiohttp.ClientSession, load: ClientLoad, out: TextIO) -> None:
    """Keep ``parallel`` requests in flight until the time is over."""
    url, bodies = f"{load.url}/v1/completions", load.bodies()
    end_s = time.perf_counter() + load.duration_s

    async def user(number: int) -> None:
        while time.perf_counter() < end_s:
            await send(session, url, bodies[number % len(bodies)], number, out)
            number += load.parallel

    await asyncio.gather(*(user(number) for number in range(load.parallel)))


async def open_loop(session: aiohttp.ClientSession, load: ClientLoad, out: TextIO) -> None:
    """Send each request at its planned time."""
    url, bodies = f"{load.url}/v1/completions", load.bodies()
    async with asyncio.TaskGroup() as tasks:
        for number, due_ns in enumerate(load.due_ns(time.perf_counter_ns())):
            await asyncio.sleep(max(0.0, (due_ns - time.perf_counter_ns()) / 1e9))
            tasks.create_task(send(session, url, bodies[number % len(bodies)], number, out))


async def main() -> None:
    load = read_load()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        with load.open() as out:
            await (closed_loop if load.rate is None else open_loop)(session, load, out)


if __name__ == "__main__":
    run(main())
