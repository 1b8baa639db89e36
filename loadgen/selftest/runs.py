"""The runs of ``loadgen selftest``: this machine's own loadgen, as a command, against the built-in server."""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from loadgen.core.capacity import LONG_ANSWER, LONG_PROMPT, SHORT_ANSWER, SHORT_PROMPT, Calibration, RateTruth, machine
from loadgen.selftest.truth import Served
from loadgen.selftest.truthfigures import quantile, received_ns, steady_rate, ttft_errors_ms
from loadgen.selftest.truthprocess import TruthProcess, truth_server
from tracefile import InputError, keyed_id, load_key, load_trace
from wire.process import module_command, module_environment

PARALLEL = 64
"""Requests in flight for each sender where it goes as fast as it can."""

RATES = (50.0, 200.0)
PACED_ANSWER = 64
AT_ONCE = ("--tokens-per-write", "16")
PACED = ("--ttft-ms", "20:80", "--gap-ms", "10", "--tokens-per-write", "1")
LONGEST_S = 60.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run that is over."""

    served: list[Served]
    """What the server saw of it."""
    summary: dict[str, Any]
    """As ``loadgen --json`` writes it."""
    trace: Path

    @property
    def rate(self) -> float:
        """Requests a second that reached the server while the run was steady."""
        return steady_rate(received_ns(self.served))


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs ``loadgen`` as a command, one run after another, each in a folder of its own."""

    seconds: float
    procs: int
    folder: Path
    tell: Callable[[str], None]

    def saturated(self, server: TruthProcess, name: str, answer: int, prompt: int) -> Run:
        """As many requests a second as it can."""
        parallel = PARALLEL * self.procs
        self.tell(f"{name}: {parallel} requests in flight, for {self.seconds:g} s")
        return self._run(server, name, answer, prompt, ["--parallel", str(parallel), "--duration", f"{self.seconds:g}"])

    def at_rate(self, server: TruthProcess, rate: float) -> RateTruth:
        """So many a second, twice as long."""
        seconds = 2 * self.seconds
        self.tell(f"{rate:g} requests/s, for {seconds:g} s")
        flags = ["--pattern", "constant", "--rate", f"{rate:g}", "--duration", f"{seconds:g}"]
        run = self._run(server, f"at {rate:g}", PACED_ANSWER, SHORT_PROMPT, flags)
        errors_ms = ttft_errors_ms(run.served, told_ttfts_ns(run.trace, run.served))
        lag = run.summary["lag"] or {}
        return RateTruth(
            rate=rate,
            requests=len(run.served),
            ttft_error_p50_ms=_rounded(quantile(errors_ms, 0.5)),
            ttft_error_p99_ms=_rounded(quantile(errors_ms, 0.99)),
            lag_p50_ms=lag.get("p50_ms"),
            lag_p99_ms=lag.get("p99_ms"),
            client_cpu=run.summary["client_cpu"],
        )

    def _run(self, server: TruthProcess, name: str, answer: int, prompt: int, flags: Sequence[str]) -> Run:
        """Raises InputError with loadgen's words if it fails."""
        folder = self.folder / name.replace(" ", "-")
        folder.mkdir()
        trace, summary = folder / "trace.jsonl", folder / "summary.json"
        command = module_command("loadgen", "--url", server.url, "--trace", str(trace), "--json", str(summary))
        command += ["--output-tokens", str(answer), "--prompt-tokens", str(prompt), *flags]
        command += ["--procs", str(self.procs)] if self.procs > 1 else []
        before = len(server.truth().served)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LONGEST_S, check=False, env=module_environment()
        )
        if done.returncode:
            raise InputError(f"calibrate: loadgen failed here: {done.stderr.strip()[-500:]}; expected it to run")
        return Run(server.truth().served[before:], msgspec.json.decode(summary.read_bytes()), trace)


def calibrate(seconds: float, procs: int, folder: Path, tell: Callable[[str], None]) -> Calibration:
    """Measure this machine in three runs of about ``seconds`` and two twice as long.

    Raises InputError if loadgen cannot run here.
    """
    runner = Runner(seconds, procs, folder, tell)
    with truth_server(AT_ONCE) as server:
        short = runner.saturated(server, "short answers", SHORT_ANSWER, SHORT_PROMPT)
        long = runner.saturated(server, "long answers", LONG_ANSWER, SHORT_PROMPT)
        prompts = runner.saturated(server, "long prompts", SHORT_ANSWER, LONG_PROMPT)
    with truth_server(PACED) as server:
        at_rates = [runner.at_rate(server, rate) for rate in RATES]
    return Calibration(
        machine=machine(),
        measured=f"{datetime.now(UTC):%Y-%m-%d}",
        procs=procs,
        requests_per_s=round(short.rate, 1),
        events_per_s=round(long.rate * LONG_ANSWER, 1),
        prompt_tokens_per_s=round(prompts.rate * LONG_PROMPT, 1),
        requests_per_core_s=round(short.rate / short.summary["client_cpu"], 1),
        events_per_core_s=round(long.rate * LONG_ANSWER / long.summary["client_cpu"], 1),
        at_rates=at_rates,
    )


def told_ttfts_ns(trace: Path, served: Sequence[Served]) -> dict[str, float]:
    """What a client's trace says the first tokens took, by the ids that the server saw: a trace has them keyed."""
    key = load_key()
    _, records = load_trace(trace)
    told = {str(record.request_id): record.ttft_ms for record in records}
    found = ((one.request_id, told.get(keyed_id(key, "request", one.request_id))) for one in served)
    return {name: ttft_ms * 1e6 for name, ttft_ms in found if ttft_ms is not None}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
