"""A load client as a competent user of aiohttp writes one: one session, streamed answers, a line kept per request."""

import asyncio
import time
from typing import Any, TextIO

import aiohttp
import msgspec

from scripts.loadbench.clientload import ClientLoad, keep, read_load
from wire.loop import run

decode = msgspec.json.Decoder().decode


async def send(session: aiohttp.ClientSession, load: ClientLoad, number: int, out: TextIO) -> None:
    """Send a request and read its response, event by event."""
    request_id = f"r{number}"
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    read_ns: list[int] = []
    tokens: list[int] = []
    rest = b""
    sent_ns = time.perf_counter_ns()
    async with session.post(f"{load.url}/v1/completions", data=load.body(number), headers=headers) as response:
        response.raise_for_status()
        async for data in response.content.iter_any():
            at_ns = time.perf_counter_ns()
            *events, rest = (rest + data).split(b"\n\n")
            found = sum(map(tokens_of, events))
            if found:
                read_ns.append(at_ns)
                tokens.append(found)
    keep(out, request_id, sent_ns, read_ns, tokens)


def tokens_of(event: bytes) -> int:
    """Number of tokens in an event."""
    data = event.removeprefix(b"data: ")
    if data == b"[DONE]":
        return 0
    decoded: dict[str, Any] = decode(data)
    return sum(len(choice["token_ids"]) for choice in decoded["choices"])


async def closed_loop(session: aiohttp.ClientSession, load: ClientLoad, out: TextIO) -> None:
    """So many requests in flight until the time is over."""
    end_s = time.perf_counter() + load.duration_s

    async def user(first: int) -> None:
        number = first
        while time.perf_counter() < end_s:
            await send(session, load, number, out)
            number += load.parallel

    await asyncio.gather(*(user(number) for number in range(load.parallel)))


async def open_loop(session: aiohttp.ClientSession, load: ClientLoad, out: TextIO) -> None:
    """Each request at its time."""
    async with asyncio.TaskGroup() as tasks:
        for number, due_ns in load.due_ns(time.perf_counter_ns()):
            wait_s = (due_ns - time.perf_counter_ns()) / 1e9
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.create_task(send(session, load, number, out))


async def main() -> None:
    """The load, over as many connections as it needs."""
    load = read_load()
    connector = aiohttp.TCPConnector(limit=0)
    with load.out.open("w") as out:
        async with aiohttp.ClientSession(connector=connector) as session:
            await (closed_loop if load.rate is None else open_loop)(session, load, out)


if __name__ == "__main__":
    run(main())
