"""How closely clients of ``sim serve`` see the engine's virtual clock, and how many requests it takes.

    python scripts/bench_serve.py fidelity --rate 200 --seconds 15
    python scripts/bench_serve.py throughput --streams 32 --tokens 16

Fidelity: requests in a poisson stream; each client-side TTFT and gap is compared with what the engine's clock says of
the same token. Throughput: closed-loop streams against ``--speed max``. Server and client have a core each, if there
are two.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from sim.__main__ import main as sim
from sim.realtime import Generation, RealTimeEngine
from wire.client import Client, Exchange
from wire.loop import run
from wire.url import parse_url

Truth = dict[int, tuple[float, list[float]]]
"""Prompt length, which tells requests apart, to TTFT and token times on the engine's clock, ms."""
HEADERS = ((b"content-type", b"application/json"),)
FIRST_LENGTH = 64


def serve(flags: Sequence[str], core: int | None, truth: Path | None) -> None:
    """The server's process; with ``truth``, it notes every token's time on the engine's clock."""
    pin(core)
    seen: Truth = {}
    if truth is not None:
        count_token = RealTimeEngine._count_token

        def noting(engine: RealTimeEngine, generation: Generation) -> None:
            count_token(engine, generation)
            times_ms = seen.setdefault(generation.request.prompt_tokens, (generation.arrival_ms, []))[1]
            times_ms.append(engine.now_ms)

        setattr(RealTimeEngine, "_count_token", noting)  # noqa: B010 - a hook that no product code needs
    code = sim(["serve", *flags])
    if truth is not None:
        truth.write_text(json.dumps(seen))
    sys.exit(code)


def pin(core: int | None) -> None:
    """Keep this process on one core."""
    if core is not None:
        os.sched_setaffinity(0, {core})


def body(prompt_tokens: int, max_tokens: int) -> bytes:
    """A streamed completion that shares nothing with one of another length."""
    prompt = [1000 + prompt_tokens] * prompt_tokens
    return json.dumps({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}).encode()


async def send_poisson(url: str, rate: float, seconds: float, tokens: int) -> dict[int, Exchange]:
    """Requests of distinct lengths at absolute, exponentially spaced times."""
    client, draws = Client(parse_url(url)), random.Random(1)
    await client.warm(64)
    exchanges: dict[int, Exchange] = {}
    tasks = []
    due_s = start_s = time.perf_counter() + 0.2
    for length in range(FIRST_LENGTH, FIRST_LENGTH + round(rate * seconds)):
        due_s += draws.expovariate(rate)
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        exchange = exchanges[length] = Exchange()
        request = client.request("POST", "/v1/completions", HEADERS, body(length, tokens), into=exchange)
        tasks.append(asyncio.create_task(request))
    await asyncio.gather(*tasks)
    print(f"{len(tasks)} requests in {time.perf_counter() - start_s:.1f} s")
    await client.close()
    return exchanges


async def send_closed_loop(url: str, streams: int, tokens: int, seconds: float) -> float:
    """``streams`` clients, each sending its next request when its last one is done; requests a second."""
    client, done = Client(parse_url(url)), 0
    until_ns = perf_counter_ns() + round(seconds * 1e9)

    async def one(number: int) -> None:
        nonlocal done
        while perf_counter_ns() < until_ns:
            exchange = await client.request("POST", "/v1/completions", HEADERS, body(64 + number, tokens))
            assert exchange.status == 200, exchange
            done += 1

    await asyncio.gather(*(one(number) for number in range(streams)))
    await client.close()
    return done / seconds


def errors_ms(exchanges: dict[int, Exchange], truth: Truth) -> tuple[list[float], list[float]]:
    """Client's TTFT and gaps minus the engine's, ms; a gap only where a read carries one token."""
    ttft, itl = [], []
    for length, exchange in exchanges.items():
        arrival_ms, token_ms = truth[length]
        ttft.append((exchange.reads[0].at_ns - exchange.sent_ns) / 1e6 - (token_ms[0] - arrival_ms))
        reads = [read for read in exchange.reads if b'"text":' in read.data]
        if len(reads) == len(token_ms):
            seen_ms = np.array([read.at_ns for read in reads]) / 1e6
            itl.extend((np.diff(seen_ms) - np.diff(token_ms)).tolist())
    return ttft, itl


def describe(name: str, errors: Sequence[float]) -> str:
    """Signed median, and quantiles of the size, of some errors."""
    size = np.abs(errors)
    p50, p90, p99 = np.quantile(size, [0.5, 0.9, 0.99])
    signed, worst = np.median(errors), size.max()
    shown = f"{name}: n {len(size)}; median {signed:+.3f} ms;"
    return f"{shown} size p50 {p50:.3f} p90 {p90:.3f} p99 {p99:.3f} max {worst:.1f}"


def main() -> int:
    """Start a server, send, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fidelity", "throughput"])
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--tokens", type=int, default=16, help="a request's answer")
    parser.add_argument("--streams", type=int, default=32, help="closed-loop clients")
    args, flags = parser.parse_known_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    server_core, client_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    truth = Path(tempfile.mkdtemp()) / "truth.json"
    speed = "max" if args.what == "throughput" else "1"
    pace = ["--t0-ms", "3", "--per-prefill-token-ms", "0.0005", "--per-decode-ms", "0.02", "--f0-ms", "2"]
    serving = ["--listen", f"127.0.0.1:{port}", "--speed", speed, "--kv-blocks", "16384", "--max-num-seqs", "256"]
    noted = truth if args.what == "fidelity" else None
    server = multiprocessing.Process(target=serve, args=([*serving, *pace, *flags], server_core, noted))
    server.start()
    pin(client_core)
    wait_until_listening(port)
    url = f"http://127.0.0.1:{port}"
    exchanges: dict[int, Exchange] = {}
    if args.what == "fidelity":
        exchanges = run(send_poisson(url, args.rate, args.seconds, args.tokens))
    else:
        rate = run(send_closed_loop(url, args.streams, args.tokens, args.seconds))
        print(f"{rate:.0f} requests/s, {rate * args.tokens:.0f} tokens/s, streams of {args.tokens} tokens")
    server.terminate()
    server.join()
    if args.what == "fidelity":
        seen: Truth = {int(length): times for length, times in json.loads(truth.read_text()).items()}
        ttft, itl = errors_ms(exchanges, seen)
        print(describe("TTFT", ttft))
        print(describe("ITL", itl))
    return server.exitcode or 0


def wait_until_listening(port: int) -> None:
    """Return once the server accepts connections."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.05)
    sys.exit("the server did not start")


if __name__ == "__main__":
    sys.exit(main())
