"""Runs of a client on a case, against a reference server on another core; latencies compared with the server's log."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from measure.quantiles import quantile as order_statistic
from scripts.loadbench.clientload import ClientLoad
from scripts.processes import on_core
from scripts.reference_server import Pace, Served, ServerLog, reference_server
from tracefile.files.reading import load_trace
from tracefile.hashing.blockhash import keyed_id
from tracefile.hashing.hashkey import load_key
from wire.process import module_command, module_environment

STEADY = (0.2, 0.95)
"""Share of a run in which rates are measured: after the start and before the end of all clients."""

Times = npt.NDArray[np.int64]
Sample = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Load, and the pace of the server's tokens."""

    name: str
    output_tokens: int
    prompt_tokens: int = 256
    rate: float | None = None
    """Requests a second at equal gaps; null: ``parallel`` in flight."""
    parallel: int = 64
    duration_s: float
    server: Pace


AT_ONCE = Pace(tokens_per_write=16)
PACED = Pace(ttft_low_ms=20.0, ttft_high_ms=80.0, gap_ms=10.0)


def cases(duration_s: float) -> list[Case]:
    """Return two closed-loop cases and two cases at a rate; each about ``duration_s`` long."""
    return [
        Case(name="short", output_tokens=16, duration_s=duration_s, server=AT_ONCE),
        Case(name="long", output_tokens=256, duration_s=duration_s, server=AT_ONCE),
        Case(name="rate50", output_tokens=64, rate=50.0, duration_s=2 * duration_s, server=PACED),
        Case(name="rate200", output_tokens=64, rate=200.0, duration_s=2 * duration_s, server=PACED),
    ]


@dataclass(frozen=True, slots=True)
class Client:
    """Client in the benchmark."""

    name: str
    command: Callable[[Case, str, Path], list[str]]
    """Returns the command line from a case, the server's URL and the output folder."""
    ttft_ns: Callable[[Path, Iterable[str]], dict[str, float]]
    """Returns the client's TTFT by request id, from its output folder and the request ids in the server's log."""


def reference(name: str, module: str) -> Client:
    """Return a client of this package."""

    def command(case: Case, url: str, folder: Path) -> list[str]:
        load = ClientLoad(
            url=url,
            out=str(folder / "requests.jsonl"),
            duration_s=case.duration_s,
            rate=case.rate,
            parallel=case.parallel,
            prompt_tokens=case.prompt_tokens,
            output_tokens=case.output_tokens,
        )
        return module_command(f"scripts.loadbench.{module}", msgspec.json.encode(load).decode())

    return Client(name, command, _reference_ttfts)


def loadgen(case: Case, url: str, folder: Path) -> list[str]:
    """Return the command of loadgen with complete recording: block hashes, records, trace."""
    arrivals = ["--parallel", str(case.parallel)]
    if case.rate is not None:
        arrivals = ["--pattern", "constant", "--rate", f"{case.rate:g}"]
    return module_command(
        *("loadgen", "--url", url, "-o", str(folder / "trace.jsonl"), "--model", "truth"),
        *("--duration", f"{case.duration_s:g}s", *arrivals, "--json"),
        *("--prompt-tokens", str(case.prompt_tokens), "--output-tokens", str(case.output_tokens)),
    )


def trace_ttfts(folder: Path, request_ids: Iterable[str]) -> dict[str, float]:
    """Return the TTFTs in loadgen's trace by request id; the trace has keyed ids, with loadgen's key."""
    if not (folder / "trace.jsonl").exists():
        return {}
    key = load_key()
    ttfts = {str(record.request_id): record.ttft_ms for record in load_trace(folder / "trace.jsonl")[1]}
    pairs = ((name, ttfts.get(keyed_id(key, "request", name))) for name in request_ids)
    return {name: ttft_ms * 1e6 for name, ttft_ms in pairs if ttft_ms is not None}


def _reference_ttfts(folder: Path, request_ids: Iterable[str]) -> dict[str, float]:
    if not (folder / "requests.jsonl").exists():
        return {}
    lines = (json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines())
    return {line["request_id"]: line["ttft_ns"] for line in lines if line["ttft_ns"] is not None}


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of a run; null: not applicable to the case or client."""

    client: str
    case: str
    requests: int
    """Requests completed by the server."""
    requests_per_s: float
    events_per_s: float
    cpu_us_per_request: float
    """CPU time of all processes of the client, start and exit included, per request."""
    server_cpu: float
    """CPU usage of the server, in cores; near 1, the server is the bottleneck."""
    ttft_error_p50_ms: float | None
    ttft_error_p99_ms: float | None
    lag_p99_ms: float | None
    """Lag of arrivals at the server against equal gaps, from the earliest arrival."""
    first_request_s: float | None
    """Time from the client's start to its first request at the server."""
    complaint: str | None
    """End of the client's stderr, if it failed."""


def measure(client: Client, case: Case, folder: Path) -> Measured:
    """Run a client on core 1 with the server on core 0; its files go to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with reference_server(case.server, folder / "server.log", core=0) as server:
        command, launched_ns = client.command(case, server.url, folder), time.perf_counter_ns()
        with (folder / "stderr").open("w") as errors, on_core(1):
            quiet = subprocess.DEVNULL
            process = subprocess.Popen(command, stdout=quiet, stderr=errors, env=module_environment())
            _, status, usage = os.wait4(process.pid, 0)
        code = process.returncode = os.waitstatus_to_exitcode(status)
        log = server.log()
    ttfts_ns = client.ttft_ns(folder, [request.request_id for request in log.served])
    complaint = None if code == 0 else f"exit {code}: {(folder / 'stderr').read_text()[-300:]}"
    cpu_s = usage.ru_utime + usage.ru_stime
    return figures_of(client.name, case, log, ttfts_ns, launched_ns=launched_ns, cpu_s=cpu_s, complaint=complaint)


def figures_of(
    client: str,
    case: Case,
    log: ServerLog,
    ttfts_ns: Mapping[str, float],
    *,
    launched_ns: int,
    cpu_s: float,
    complaint: str | None = None,
) -> Measured:
    """Return the figures of a run; ``ttfts_ns``: TTFT reported by the client, by request id."""
    ended = [request for request in log.served if request.last_write_ns is not None]
    received = np.array([request.received_ns for request in ended], dtype=np.int64)
    rate, errors_ms = steady_rate(received), ttft_errors_ms(ended, ttfts_ns)
    return Measured(
        client=client,
        case=case.name,
        requests=len(ended),
        requests_per_s=rate,
        events_per_s=rate * case.output_tokens,
        cpu_us_per_request=cpu_s * 1e6 / max(1, len(ended)),
        server_cpu=log.cpu_ns / max(1, log.read_ns - log.started_ns),
        ttft_error_p50_ms=quantile(errors_ms, 0.5),
        ttft_error_p99_ms=quantile(errors_ms, 0.99),
        lag_p99_ms=None if case.rate is None else quantile(lags_ms(received, case.rate), 0.99),
        first_request_s=(int(received.min()) - launched_ns) / 1e9 if len(received) else None,
        complaint=complaint,
    )


def steady_rate(received: Times) -> float:
    """Return the throughput in requests per second in the steady part; 0 with fewer than 2 requests."""
    if len(received) < 2:
        return 0.0
    first, last = int(received.min()), int(received.max())
    start, end = (round(first + share * (last - first)) for share in STEADY)
    return int(np.count_nonzero((received >= start) & (received < end))) * 1e9 / max(1, end - start)


def ttft_errors_ms(served: Iterable[Served], reported_ns: Mapping[str, float]) -> Sample:
    """Return client TTFT − server TTFT (first-token latency) of each request with both."""
    pairs = ((reported_ns.get(request.request_id), request.ttft_ns) for request in served)
    return np.array([(client - server) / 1e6 for client, server in pairs if client is not None and server is not None])


def lags_ms(received: Times, rate: float) -> Sample:
    """Return the delay of each arrival against equal gaps; the earliest has delay 0."""
    ahead_ns = np.sort(received) - np.arange(len(received)) * 1e9 / rate
    return (ahead_ns - ahead_ns.min()) / 1e6 if len(ahead_ns) else ahead_ns


def quantile(sample: Sample, level: float) -> float | None:
    return order_statistic(np.sort(sample), level) if len(sample) else None
