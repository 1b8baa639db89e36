"""Benchmark of the tap against nginx: one run, one machine, everything recorded.

    python -m scripts.bench_tap            # under three minutes
    python -m scripts.bench_tap --quick    # under 40 seconds: one short round

The upstream and the load client share a process on core 0, every proxy runs on core 1, the tap's recorder on core 0
with low priority. Every proxy is measured once a round; values are medians over rounds. Method: docs/dev/tap-bench.md.
"""

import argparse
import asyncio
import contextlib
import gc
import os
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple

import msgspec
import numpy as np

from scripts.conditions import Watch
from scripts.figures import Figure, figure_table
from scripts.processes import cpu_ns, pin, rss_mb
from scripts.proxybench.clients import Prompt, connected, ended
from scripts.proxybench.proxies import LOAD_CORE, Proxy, binary, nginx, tap
from scripts.reference_server import Pace, ReferenceServer
from wire.loop import run

FIGURES = (
    Figure("cpu", "CPU µs per chunk, 25.6k chunks/s", ",.2f", "≤ nginx × 1.3"),
    Figure("recorder_cpu", "– recorder's CPU µs per chunk", ",.2f"),
    Figure("rate", "– chunks/s sent", ",.0f"),
    Figure("rss", "– RSS MB, data plane", ",.1f", "≤ 80"),
    Figure("p50", "added chunk p50 µs, 6.4k chunks/s", ",.0f"),
    Figure("p99", "added chunk p99 µs", ",.0f", "≤ nginx + 150"),
    Figure("ttft", "added TTFT µs, solo", ",.0f", "≤ nginx × 1.5"),
    Figure("ttft_large", "added TTFT µs, 400 KB prompt", ",.0f", "≤ nginx × 1.5"),
    Figure("lost", "requests not recorded, all runs", ",.0f", "≤ 0"),
    Figure("failures", "failed streams and lost chunks, all runs", ",.0f", "≤ 0"),
)
BUSY_STREAMS, QUIETER_STREAMS = 512, 128
GAP_MS, OPENING_MS = 20.0, 1000.0
"""Time between the chunks of a stream; time to the first chunk, until when all streams are open."""
SMALL_BYTES, LARGE_BYTES = 400, 400_000
WARM_S, WARM_REQUESTS = 0.4, 5
DRAIN_S, END_S = 60.0, 30.0
ENDING_EVENTS = 2
"""Events in the last chunk of a stream: usage and ``[DONE]``."""


class Plan(NamedTuple):
    """Rounds, time window and requests per round."""

    rounds: int
    window_s: float
    requests: int
    """Requests per prompt size and round, for TTFT."""


class Window(NamedTuple):
    """Chunk latencies of a time window, and the CPU time."""

    latency_us: list[float]
    """From the server's write to the client's read, in µs."""
    plane_ns: int
    """CPU time of the proxy's data plane."""


FULL, QUICK = Plan(rounds=3, window_s=2.0, requests=110), Plan(rounds=1, window_s=1.0, requests=60)


class Bench:
    """State of a run: the upstream, and latency, TTFT and CPU values by proxy and figure."""

    def __init__(self, plan: Plan, server: ReferenceServer) -> None:
        self._plan, self._server = plan, server
        self.values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.failures: dict[str, int] = defaultdict(int)

    async def measure(self, proxies: Sequence[Proxy]) -> None:
        for _ in range(self._plan.rounds):
            for proxy in proxies:
                await self._cpu(proxy)
            for proxy in proxies:
                latency_us = (await self._window(proxy, QUIETER_STREAMS)).latency_us
                self._add_over_direct(proxy, "p50", float(np.percentile(latency_us, 50)))
                self._add_over_direct(proxy, "p99", float(np.percentile(latency_us, 99)))
            for proxy in proxies:
                self._add_over_direct(proxy, "ttft", await self._ttft_us(proxy, SMALL_BYTES, 0.002))
                self._add_over_direct(proxy, "ttft_large", await self._ttft_us(proxy, LARGE_BYTES, 0.02))

    def _add_over_direct(self, proxy: Proxy, figure: str, value: float) -> None:
        """Add a round's latency minus the direct connection's latency of the same round."""
        direct = self.values["direct"][figure]
        self.values[proxy.name][figure].append(value if proxy.name == "direct" else value - direct[-1])

    async def _cpu(self, proxy: Proxy) -> None:
        values, before_ns = self.values[proxy.name], total_ns(proxy.recorder)
        latency_us, plane_ns = await self._window(proxy, BUSY_STREAMS)
        values["rate"].append(len(latency_us) / self._plan.window_s)
        if proxy.pid is not None:
            values["cpu"].append(plane_ns / 1e3 / len(latency_us))
            values["rss"].append(rss_mb(proxy.pid))
        if proxy.recorder is not None:
            all_chunks = BUSY_STREAMS * self._stream_tokens
            values["recorder_cpu"].append((total_ns(proxy.recorder) - before_ns) / 1e3 / all_chunks)

    @property
    def _stream_tokens(self) -> int:
        """Tokens of a stream: it ends after the time window."""
        return round((WARM_S + self._plan.window_s + OPENING_MS / 1e3) / (GAP_MS / 1e3))

    async def _window(self, proxy: Proxy, streams: int) -> Window:
        """Open streams, warm up, measure a time window, and wait for the ends of the streams."""
        prompt, tokens = Prompt.of_bytes(SMALL_BYTES), self._stream_tokens
        times = {"ttft_low_ms": OPENING_MS, "ttft_high_ms": OPENING_MS + GAP_MS, "gap_ms": GAP_MS, "tick_ms": 1.0}
        self._server.pace = msgspec.structs.replace(Pace(prompt_tokens=prompt.tokens), **times)
        self._server.pop_served()
        clients = await connected(proxy.port, streams)
        responses = [client.send(prompt.request(f"{number}", tokens)) for number, client in enumerate(clients)]
        await asyncio.sleep((OPENING_MS + GAP_MS) / 1e3 + WARM_S)
        since_ns, plane_ns = perf_counter_ns(), total_ns(proxy.pid)
        await asyncio.sleep(self._plan.window_s)
        until_ns, plane_ns = perf_counter_ns(), total_ns(proxy.pid) - plane_ns
        completed = await ended(responses, END_S)
        served = {request.request_id: request for request in self._server.pop_served()}
        latency_us = []
        for number, client in enumerate(clients):
            request = served[f"{number}"]
            self.failures[proxy.name] += max(0, request.tokens + ENDING_EVENTS - len(client.events_ns))
            pairs = zip(request.writes_ns, client.events_ns, strict=False)
            latency_us += [(read_ns - sent_ns) / 1e3 for sent_ns, read_ns in pairs if since_ns <= sent_ns < until_ns]
            client.close()
        self.failures[proxy.name] += streams - completed
        await wait_for_recorder(proxy)
        return Window(latency_us, plane_ns)

    async def _ttft_us(self, proxy: Proxy, prompt_bytes: int, pause_s: float) -> float:
        """Return the median TTFT (first token) of sequential requests, with a pause for the recorder after each."""
        prompt, [client] = Prompt.of_bytes(prompt_bytes), await connected(proxy.port, 1)
        self._server.pace = Pace(prompt_tokens=prompt.tokens)
        request, times_us = prompt.request("solo", 1), []
        for _ in range(WARM_REQUESTS + self._plan.requests):
            await asyncio.sleep(pause_s)
            started_ns = perf_counter_ns()
            self.failures[proxy.name] += not await client.send(request)
            times_us.append((client.events_ns[0] - started_ns) / 1e3)
        client.close()
        await wait_for_recorder(proxy)
        return statistics.median(times_us[WARM_REQUESTS:])


async def measured(plan: Plan, upstream: socket.socket, proxies: Sequence[Proxy]) -> Bench:
    """Run the upstream and measure all proxies."""
    server = ReferenceServer(Pace())
    await server.listen(upstream)
    bench = Bench(plan, server)
    gc.collect()
    gc.freeze()
    await bench.measure(proxies)
    return bench


async def wait_for_recorder(proxy: Proxy) -> None:
    """Wait until the recorder is idle, so that its work does not affect the next window."""
    started = time.monotonic()
    while proxy.recorder is not None and time.monotonic() - started < DRAIN_S:
        before = cpu_ns(proxy.recorder)
        await asyncio.sleep(0.1)
        if cpu_ns(proxy.recorder) - before < 4_000_000:
            return


def total_ns(pid: int | None) -> int:
    """Return the CPU time of a process; 0 without a process."""
    return 0 if pid is None else cpu_ns(pid)


@contextlib.contextmanager
def proxies_up(folder: Path, upstream: int) -> Iterator[list[Proxy]]:
    """Run all proxies; an idle proxy uses no CPU."""
    with contextlib.ExitStack() as stack:
        proxies, program = [Proxy("direct", upstream)], binary("nginx")
        if program is None:
            print("bench_tap: nginx is not installed (Debian: apt-get install nginx): omitted", file=sys.stderr)
        else:
            proxies.append(stack.enter_context(nginx(program, folder, upstream)))
        proxies.append(stack.enter_context(tap(folder, upstream)))
        yield proxies


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; print the table of latencies and the tap's request counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short round: a check, not a result")
    plan = QUICK if parser.parse_args(argv).quick else FULL
    pin(os.getpid(), LOAD_CORE)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    watch, upstream = Watch(), socket.create_server(("127.0.0.1", 0))  # the tap waits until it accepts connections
    port = upstream.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="bench-tap-") as name, proxies_up(Path(name), port) as proxies:
        bench = run(measured(plan, upstream, proxies))
        conditions = watch.stop(pid for proxy in proxies for pid in (proxy.pid, proxy.recorder) if pid is not None)
    account = proxies[-1].account
    bench.values["tap"]["lost"].append(account["offered"] - account["recorded"])
    for proxy in proxies:
        bench.values[proxy.name]["failures"].append(bench.failures[proxy.name])
    print(figure_table(FIGURES, {proxy.name: bench.values[proxy.name] for proxy in proxies}, "tap", ["nginx"]))
    print(f"\n{conditions}; rounds: {plan.rounds}")
    print(f"tap: offered {account['offered']:,}, recorded {account['recorded']:,}, dropped {account['dropped'] or 0}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
