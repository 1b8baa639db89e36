"""Capacity of this machine: runs of loadgen as a command, against a server that knows the truth."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec

from loadgen.core.capacity import LONG_OUTPUT, LONG_PROMPT, SHORT_OUTPUT, SHORT_PROMPT, Capacity, RateTruth, machine
from loadgen.selftest.truth import Served, Truth, quantile, received_ns, steady_rate, ttft_errors_ms
from tracefile import InputError, keyed_id, load_key, load_trace
from wire.process import module_command, module_environment

PARALLEL = 64

RATES = (50.0, 200.0)
PACED_OUTPUT = 64
AT_ONCE = ("--tokens-per-write", "16")
PACED = ("--ttft-ms", "20:80", "--gap-ms", "10", "--tokens-per-write", "1")
RUN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class TruthProcess:
    """A server that runs."""

    url: str
    pid: int

    def truth(self) -> Truth:
        output = httpx.get(f"{self.url}/truth", trust_env=False, timeout=60.0).raise_for_status()
        return msgspec.msgpack.decode(output.content, type=Truth)


@contextlib.contextmanager
def truth_server(flags: Sequence[str] = (), *, prefix: Sequence[str] = ()) -> Iterator[TruthProcess]:
    """Run the server within the block; ``prefix``: command before it, such as ``taskset``."""
    command = [*prefix, *module_command("loadgen.selftest.truthserver", *flags)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=module_environment())
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"{command!r} did not start")
        yield TruthProcess(url, process.pid)
    finally:
        process.stdin.close()  # its sign to end
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@dataclass(frozen=True, slots=True)
class Run:
    """Finished run."""

    served: list[Served]
    summary: dict[str, Any]
    trace: Path

    @property
    def rate(self) -> float:
        """Requests a second in the steady part of the run."""
        return steady_rate(received_ns(self.served))


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs ``loadgen`` as a command, one run after another, each in a folder of its own."""

    seconds: float
    procs: int
    folder: Path
    tell: Callable[[str], None]

    def saturated(self, server: TruthProcess, name: str, output: int, prompt: int) -> Run:
        parallel = PARALLEL * self.procs
        self.tell(f"{name}: {parallel} requests in flight, for {self.seconds:g} s")
        return self._run(
            server, name, output, prompt, ["--parallel", str(parallel), "--duration", f"{self.seconds:g}s"]
        )

    def at_rate(self, server: TruthProcess, rate: float) -> RateTruth:
        seconds = 2 * self.seconds
        self.tell(f"{rate:g} requests/s, for {seconds:g} s")
        flags = ["--pattern", "constant", "--rate", f"{rate:g}", "--duration", f"{seconds:g}s"]
        run = self._run(server, f"at {rate:g}", PACED_OUTPUT, SHORT_PROMPT, flags)
        errors_ms = ttft_errors_ms(run.served, told_ttfts_ns(run.trace, run.served))
        lag = (run.summary["metrics"] or {"client": {"lag_ms": None}})["client"]["lag_ms"] or {}
        return RateTruth(
            rate=rate,
            requests=len(run.served),
            ttft_error_p50_ms=_rounded(quantile(errors_ms, 0.5)),
            ttft_error_p99_ms=_rounded(quantile(errors_ms, 0.99)),
            lag_p50_ms=_rounded(lag.get("p50")),
            lag_p99_ms=_rounded(lag.get("p99")),
            client_cpu=run.summary["client_cpu"],
        )

    def _run(self, server: TruthProcess, name: str, output: int, prompt: int, flags: Sequence[str]) -> Run:
        folder = self.folder / name.replace(" ", "-")
        folder.mkdir()
        trace = folder / "trace.jsonl"
        command = module_command("loadgen", "--url", server.url, "-o", str(trace), "--json")
        command += ["--output-tokens", str(output), "--prompt-tokens", str(prompt), *flags]
        command += ["--procs", str(self.procs)] if self.procs > 1 else []
        before = len(server.truth().served)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, env=module_environment()
        )
        if done.returncode:
            raise InputError(f"selftest: loadgen failed here: {done.stderr.strip()[-500:]}; expected it to run")
        return Run(server.truth().served[before:], msgspec.json.decode(done.stdout), trace)


def measure_capacity(seconds: float, procs: int, folder: Path, tell: Callable[[str], None]) -> Capacity:
    """Measure in three runs of ``seconds`` and two twice as long. Raises InputError if loadgen cannot run here."""
    runner = Runner(seconds, procs, folder, tell)
    with truth_server(AT_ONCE) as server:
        short = runner.saturated(server, "short outputs", SHORT_OUTPUT, SHORT_PROMPT)
        long = runner.saturated(server, "long outputs", LONG_OUTPUT, SHORT_PROMPT)
        prompts = runner.saturated(server, "long prompts", SHORT_OUTPUT, LONG_PROMPT)
    with truth_server(PACED) as server:
        at_rates = [runner.at_rate(server, rate) for rate in RATES]
    return Capacity(
        machine=machine(),
        measured=f"{datetime.now(UTC):%Y-%m-%d}",
        procs=procs,
        requests_per_s=round(short.rate, 1),
        events_per_s=round(long.rate * LONG_OUTPUT, 1),
        prompt_tokens_per_s=round(prompts.rate * LONG_PROMPT, 1),
        requests_per_core_s=round(short.rate / short.summary["client_cpu"], 1),
        events_per_core_s=round(long.rate * LONG_OUTPUT / long.summary["client_cpu"], 1),
        at_rates=at_rates,
    )


def told_ttfts_ns(trace: Path, served: Sequence[Served]) -> dict[str, float]:
    """The client's TTFTs by the server's request ids; a trace has the ids hashed."""
    key = load_key()
    _, records = load_trace(trace)
    told = {str(record.request_id): record.ttft_ms for record in records}
    found = ((one.request_id, told.get(keyed_id(key, "request", one.request_id))) for one in served)
    return {name: ttft_ms * 1e6 for name, ttft_ms in found if ttft_ms is not None}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
