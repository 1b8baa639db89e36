"""Runs of a client on a case: on its core, against a server on another core, compared with that server's own times."""

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.loadbench.cases import Case
from scripts.loadbench.reference_server import reference_server
from scripts.loadbench.server_log import (
    Sample,
    ServerLog,
    Times,
    count_between,
    quantile,
    received_ns,
    steady_part,
    ttft_errors_ms,
)
from scripts.loadbench.subjects import Subject
from scripts.loadbench.tree import TreeCost, TreeWatch

END_S = 120.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured run; null where the case or the client does not tell."""

    subject: str
    case: str
    requests: int
    """That the server saw to their end."""
    requests_per_s: float
    events_per_s: float
    cpu_us_per_request: float | None
    """Of all the client's processes, from the first request until they are gone: what was put off is in it."""
    client_cpu: float | None
    """In cores, over the steady part."""
    server_cpu: float
    """Of the server, in cores, over its whole life: near 1, it was what was measured."""
    server_late_p99_ms: float | None
    told: int
    """Requests whose TTFT the client told."""
    ttft_error_p50_ms: float | None
    ttft_error_p99_ms: float | None
    lag_p50_ms: float | None
    """Of arrivals at the server against equal gaps, from the earliest of them."""
    lag_p99_ms: float | None
    first_request_s: float | None
    """From the client's launch to its first request at the server."""
    pss_mb: float
    rss_mb: float
    processes: int
    complaint: str | None
    """The end of what the client wrote to stderr, if it failed."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Run as it happened."""

    log: ServerLog
    ttfts_ns: dict[str, float]
    """The client's own word, by request id."""
    launched_ns: int
    cost: TreeCost
    complaint: str | None


def measure(subject: Subject, case: Case, folder: Path, *, client_core: int, server_core: int) -> Measured:
    """Run one client on one case; its files go to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with reference_server(case.server, prefix=("taskset", "-c", str(server_core))) as server:
        command = ["taskset", "-c", str(client_core), *subject.command(case, server.url, folder)]
        launched_ns = time.perf_counter_ns()
        code, cost, errors = _run(command, subject, folder, memory=case.saturating)
        log = server.log()
    ttfts_ns = subject.ttft_ns(folder, [one.request_id for one in log.served])
    complaint = None if code == 0 else f"exit {code}: {errors[-300:]}"
    return figures_of(subject.name, case, Ran(log, ttfts_ns, launched_ns, cost, complaint))


def _run(command: Sequence[str], subject: Subject, folder: Path, *, memory: bool) -> tuple[int, TreeCost, str]:
    environment = {**os.environ, **subject.environment}
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
        watch = TreeWatch(process.pid, memory=memory)
        try:
            code = process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait()
        cost = watch.stop()
    return code, cost, (folder / "stderr").read_text()


def figures_of(subject: str, case: Case, ran: Ran) -> Measured:
    """A run's figures."""
    log, cost = ran.log, ran.cost
    ended = [one for one in log.served if one.last_write_ns is not None]
    received = received_ns(ended)
    start_ns, end_ns = steady_part(received)
    steady = count_between(received, start_ns, end_ns)
    seconds = (end_ns - start_ns) / 1e9
    rate = steady / seconds if seconds else 0.0
    cpu_s = cost.cpu_between(start_ns, end_ns)
    whole_s = cost.cpu_between(int(received.min()), cost.at_ns[-1]) if len(received) and cost.at_ns else None
    errors_ms = ttft_errors_ms(ended, ran.ttfts_ns)
    lag_ms = np.empty(0) if case.rate is None else lags_ms(received, case.rate)
    lateness_ms = np.array([one.lateness_ns for one in ended if one.lateness_ns is not None]) / 1e6
    return Measured(
        subject=subject,
        case=case.name,
        requests=len(ended),
        requests_per_s=rate,
        events_per_s=rate * case.output_tokens,
        cpu_us_per_request=whole_s * 1e6 / len(ended) if whole_s is not None else None,
        client_cpu=cpu_s / seconds if cpu_s is not None and seconds else None,
        server_cpu=log.cpu_ns / max(1, log.read_ns - log.started_ns),
        server_late_p99_ms=quantile(lateness_ms, 0.99),
        told=len(errors_ms),
        ttft_error_p50_ms=quantile(errors_ms, 0.5),
        ttft_error_p99_ms=quantile(errors_ms, 0.99),
        lag_p50_ms=quantile(lag_ms, 0.5),
        lag_p99_ms=quantile(lag_ms, 0.99),
        first_request_s=(int(received.min()) - ran.launched_ns) / 1e9 if len(received) else None,
        pss_mb=cost.pss_mb,
        rss_mb=cost.rss_mb,
        processes=cost.processes,
        complaint=ran.complaint,
    )


def lags_ms(received: Times, rate: float) -> Sample:
    """Return the delay of each arrival against equal gaps; the earliest has delay 0."""
    ahead_ns = np.sort(received) - np.arange(len(received)) * 1e9 / rate
    return (ahead_ns - ahead_ns.min()) / 1e6 if len(ahead_ns) else ahead_ns
