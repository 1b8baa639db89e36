"""Fidelity of ``sim serve`` to the engine's virtual clock, as clients see it, and the load that one core carries.

    python -m scripts.bench_serve fidelity --rate 200 --tokens 16 --seconds 10 --realtime
    python -m scripts.bench_serve fidelity --rate 200 --tokens 256 -- --t0-ms 4 --per-decode-ms 0.002
    python -m scripts.bench_serve throughput --streams 32 --tokens 256
    python -m scripts.bench_serve streams --streams 2000 --seconds 10 -- --t0-ms 100 --max-num-seqs 2048

Fidelity: requests in a poisson stream from a client that does nothing but send and read; every token's read is
compared with the moment at which the engine's clock says that it exists, every TTFT with the engine's own; then the
same comes from a sender that keeps these times and has no engine, which is the machine's part of it. Throughput:
closed-loop streams against ``--speed max``. Streams: so many at once for a while. Server and client have a core each,
if there are two; with ``--realtime`` (Linux, root) both at real-time priority, for a machine that others use too. What
stands behind ``--`` goes to the server.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import random
import select
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from scripts.bare_sender import END, Schedule, send
from scripts.proxybench.processes import free_port
from sim.__main__ import main as sim
from sim.serving.engine.realtime import RealTimeEngine
from sim.serving.requests.output import Generation

Truth = dict[int, tuple[float, list[float]]]
"""Prompt length, which tells requests apart, to arrival and token times on the engine's clock, as moments in ns."""
FIRST_LENGTH = 64
PACE = (
    "--t0-ms",
    "3",
    "--per-prefill-token-ms",
    "0.0005",
    "--per-decode-ms",
    "0.02",
    "--frontend-base-ms",
    "2",
    "--no-noise",
)
POOL = ("--num-gpu-blocks", "65536", "--block-size", "16", "--max-num-seqs", "512", "--max-num-batched-tokens", "8192")
ALL_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()


def serve(flags: Sequence[str], truth: Path | None, core: int | None) -> None:
    """The server's process; with ``truth``, it notes every token's time on the engine's clock."""
    pin(core)
    seen: Truth = {}
    if truth is not None:
        submit = RealTimeEngine.submit
        engines: list[RealTimeEngine] = []

        def noting(
            engine: RealTimeEngine, generation: Generation, arrival_ms: float | None = None, extra_ms: float = 0.0
        ) -> None:
            submit(engine, generation, arrival_ms, extra_ms)
            engines[:] = [engine]
            times_ms: list[float] = []
            seen[generation.request.prompt_tokens] = (engine.moment_ns(generation.arrival_ms), times_ms)
            tell = generation.on_progress

            def telling(generation: Generation) -> None:
                tell(generation)
                times_ms.append(engine.now_ms)

            generation.on_progress = telling

        setattr(RealTimeEngine, "submit", noting)  # noqa: B010 - a hook that no product code needs
    code = sim(["serve", *flags])
    if truth is not None:
        moments = {
            length: (arrival_ns, [engines[0].moment_ns(token_ms) for token_ms in times_ms])
            for length, (arrival_ns, times_ms) in seen.items()
        }
        truth.write_text(json.dumps(moments))
    sys.exit(code)


def pin(core: int | None) -> None:
    """Keep this process on one core."""
    if core is not None:
        os.sched_setaffinity(0, {core})


def request(prompt_tokens: int, max_tokens: int) -> bytes:
    """A streamed completion that shares nothing with one of another length."""
    prompt = [1000 + prompt_tokens] * prompt_tokens
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(body)}\r\n\r\n".encode() + body


@dataclass(slots=True)
class Stream:
    """Request as its client saw it."""

    length: int
    sent_ns: int = 0
    reads: list[tuple[int, bytes]] = field(default_factory=list)
    """When each read returned, and what it held."""

    def token_ns(self) -> list[int]:
        """Read time of each token."""
        return [at_ns for at_ns, data in self.reads for _ in range(data.count(b'"text":'))]


class Client:
    """Connections opened ahead, one loop around ``epoll``, nothing parsed before the end."""

    nap_s = 0.0
    """Of every 20 ms, how long it sleeps: a real-time process that never does is stopped by the kernel."""

    def __init__(self, port: int, connections: int) -> None:
        self.poll = select.epoll()
        self.idle: deque[socket.socket] = deque()
        self.busy: dict[int, tuple[socket.socket, Stream]] = {}
        self.napped_s = time.perf_counter()
        for _ in range(connections):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.poll.register(sock.fileno(), select.EPOLLIN)
            self.idle.append(sock)

    def send(self, stream: Stream, data: bytes) -> None:
        """Send a request on a connection that is free."""
        sock = self.idle.popleft()
        self.busy[sock.fileno()] = (sock, stream)
        stream.sent_ns = perf_counter_ns()
        sock.sendall(data)

    def read(self, timeout_s: float) -> list[Stream]:
        """Read what there is, waiting so long for it; the streams that ended."""
        ended = []
        if self.nap_s and time.perf_counter() - self.napped_s > 0.02:
            time.sleep(self.nap_s)
            self.napped_s = time.perf_counter()
        for number, _ in self.poll.poll(timeout_s):
            sock, stream = self.busy[number]
            at_ns = perf_counter_ns()
            data = sock.recv(1 << 18)
            if not data:
                sys.exit("the server closed a connection")
            stream.reads.append((at_ns, data))
            if data.endswith(END):
                del self.busy[number]
                self.idle.append(sock)
                ended.append(stream)
        return ended


def send_poisson(port: int, rate: float, seconds: float, tokens: int) -> list[Stream]:
    """Requests of distinct lengths at absolute, exponentially spaced times."""
    count, draws = round(rate * seconds), random.Random(1)
    bodies = [request(FIRST_LENGTH + number, tokens) for number in range(count)]
    client = Client(port, 1000)
    streams: list[Stream] = []
    gc.disable()
    due_s = time.perf_counter() + 0.2
    while len(streams) < count or client.busy:
        now_s = time.perf_counter()
        if len(streams) < count and now_s >= due_s:
            stream = Stream(FIRST_LENGTH + len(streams))
            client.send(stream, bodies[len(streams)])
            streams.append(stream)
            due_s += draws.expovariate(rate)
        client.read(0.0)  # never asleep: waking up would be measured too
    return streams


def send_closed_loop(port: int, streams: int, tokens: int, seconds: float) -> float:
    """``streams`` clients, each sending its next request when its last one is done; requests a second."""
    client, done = Client(port, streams), 0
    bodies = [request(FIRST_LENGTH + number, tokens) for number in range(streams)]
    start_s = time.perf_counter()
    for number in range(streams):
        client.send(Stream(number), bodies[number])
    while time.perf_counter() - start_s < seconds:
        for stream in client.read(0.01):
            done += 1
            client.send(Stream(stream.length), bodies[stream.length])
    return done / (time.perf_counter() - start_s)


def hold_streams(port: int, streams: int, seconds: float) -> tuple[int, int]:
    """``streams`` endless answers at once for a while, then left: tokens read, and the fewest that one got."""
    client = Client(port, streams)
    held = [Stream(number) for number in range(streams)]
    body = request(FIRST_LENGTH, 15_000)
    for stream in held:
        client.send(stream, body)
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        client.read(0.01)
    counts = [len(stream.token_ns()) for stream in held]
    return sum(counts), min(counts)


def compare(streams: Sequence[Stream], truth: Truth) -> None:
    """Print how far the client's times are from the engine's."""
    ttft, itl, late = [], [], []
    for stream in streams:
        arrival_ns, exact_ns = truth[stream.length]
        seen_ns = stream.token_ns()
        assert len(seen_ns) == len(exact_ns), f"{len(seen_ns)} of {len(exact_ns)} tokens came"
        ttft.append((seen_ns[0] - stream.sent_ns - (exact_ns[0] - arrival_ns)) / 1e6)
        itl.extend(((np.diff(seen_ns) - np.diff(exact_ns)) / 1e6).tolist())
        late.extend(((np.array(seen_ns) - np.array(exact_ns)) / 1e6).tolist())
    print(describe("TTFT, client's minus engine's", ttft))
    print(describe("ITL, client's minus engine's", itl))
    print(describe("each token, read after it was due", late))


def describe(name: str, errors: Sequence[float]) -> str:
    """Signed median, and quantiles of the size, of some errors."""
    size = np.abs(errors)
    p50, p90, p99 = np.quantile(size, [0.5, 0.9, 0.99])
    shown = f"{name}: n {len(size)}; median {np.median(errors):+.3f} ms;"
    return f"{shown} size p50 {p50:.3f} p90 {p90:.3f} p99 {p99:.3f} max {size.max():.1f}"


def main() -> int:
    """Start a server, send, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fidelity", "throughput", "streams"])
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=16, help="a request's answer")
    parser.add_argument("--streams", type=int, default=32, help="how many at once")
    parser.add_argument("--realtime", action="store_true", help="run both at real-time priority")
    args, flags = parser.parse_known_args()
    if args.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        Client.nap_s = 0.0011
    moments = Path(tempfile.mkdtemp()) / "moments.json"
    port = free_port()
    speed = "max" if args.what == "throughput" else "1"
    serving = [
        "--listen",
        f"127.0.0.1:{port}",
        "--speed",
        speed,
        *POOL,
        *PACE,
        *(flag for flag in flags if flag != "--"),
    ]
    with started(serve, serving, moments if args.what == "fidelity" else None, port=port) as server:
        cpu_s, start_s = cpu_seconds(server.pid), time.perf_counter()
        streams: list[Stream] = []
        if args.what == "fidelity":
            streams = send_poisson(port, args.rate, args.seconds, args.tokens)
            tokens = len(streams) * args.tokens
        elif args.what == "throughput":
            rate = send_closed_loop(port, args.streams, args.tokens, args.seconds)
            print(f"{rate:.0f} requests/s, {rate * args.tokens:.0f} tokens/s, streams of {args.tokens} tokens")
            tokens = round(rate * args.tokens * (time.perf_counter() - start_s))
        else:
            tokens, fewest = hold_streams(port, args.streams, args.seconds)
            print(f"{args.streams} streams at once, the slowest got {fewest} tokens")
        took_s, cpu_s = time.perf_counter() - start_s, cpu_seconds(server.pid) - cpu_s
        cost = f"{cpu_s / took_s:.0%} of a core, {cpu_s / max(tokens, 1) * 1e6:.1f} µs a token"
        print(f"{tokens} tokens in {took_s:.1f} s; the server took {cost}", flush=True)
    if streams:
        truth = read_moments(moments)
        compare(streams, truth)
        print("the same tokens at the same moments from a sender that has no engine: the machine's own part")
        compare(*send_bare(args, truth, moments))
    return server.exitcode or 0


def send_bare(args: argparse.Namespace, truth: Truth, moments: Path) -> tuple[list[Stream], Truth]:
    """The load once more, to a bare sender that keeps the engine's times; what was seen, and when it was due."""
    lengths = {len(request(length, args.tokens)): length for length in truth}
    schedule = {}
    for size, length in lengths.items():
        arrival_ns, token_ns_of = truth[length]
        schedule[size] = [round(token_ns - arrival_ns) for token_ns in token_ns_of]
    port = free_port()
    with started(keep_time, port, schedule, moments, port=port):
        streams = send_poisson(port, args.rate, args.seconds, args.tokens)
    return streams, {lengths[size]: times for size, times in read_moments(moments).items()}


def keep_time(port: int, schedule: Schedule, moments: Path, core: int | None) -> None:
    """The bare sender's process."""
    pin(core)
    moments.write_text(json.dumps(asyncio.run(send(port, schedule))))


@contextlib.contextmanager
def started(target: Callable[..., None], *args: Any, port: int) -> Iterator[multiprocessing.Process]:
    """A server on one core, this process on another, if there are two; it is over at the end of the ``with`` block."""
    cores = sorted(ALL_CORES)
    server_core, client_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    server = multiprocessing.Process(target=target, args=(*args, server_core))
    server.start()
    pin(client_core)
    try:
        wait_until_listening(port)
        yield server
    finally:
        server.terminate()
        server.join()


def read_moments(path: Path) -> Truth:
    """Moments that a server noted, by request."""
    return {int(key): times for key, times in json.loads(path.read_text()).items()}


def cpu_seconds(pid: int | None) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
