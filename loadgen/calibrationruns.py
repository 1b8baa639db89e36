"""The runs of ``loadgen calibrate``: this machine's own loadgen, as a command, against the built-in server."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from loadgen.calibration import (
    LONG_ANSWER,
    LONG_PROMPT,
    SHORT_ANSWER,
    SHORT_PROMPT,
    Calibration,
    RateTruth,
    machine,
)
from loadgen.truth import Truth
from loadgen.truthfigures import quantile, received_ns, steady_rate, ttft_errors_ms
from loadgen.truthprocess import truth_server
from tracefile import InputError, keyed_id, load_key, load_trace

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

    truth: Truth
    summary: dict[str, Any]
    """As ``loadgen --json`` writes it."""
    folder: Path

    @property
    def rate(self) -> float:
        """Requests a second that reached the server while the run was steady."""
        return steady_rate(received_ns(self.truth.served))


def calibrate(seconds: float, procs: int, folder: Path, tell: Callable[[str], None]) -> Calibration:
    """Measure this machine in five runs of about ``seconds`` each, at rates twice as long.

    Raises InputError if loadgen cannot run here.
    """

    def saturated(name: str, answer: int, prompt: int) -> Run:
        tell(f"{name}: {PARALLEL * procs} requests in flight, for {seconds:g} s")
        flags = ["--parallel", str(PARALLEL * procs), "--duration", f"{seconds:g}"]
        return _run(folder / name.replace(" ", "-"), AT_ONCE, [*flags, *_shape(answer, prompt), *_procs(procs)])

    short = saturated("short answers", SHORT_ANSWER, SHORT_PROMPT)
    long = saturated("long answers", LONG_ANSWER, SHORT_PROMPT)
    prompts = saturated("long prompts", SHORT_ANSWER, LONG_PROMPT)
    return Calibration(
        machine=machine(),
        measured=f"{datetime.now(UTC):%Y-%m-%d}",
        procs=procs,
        requests_per_s=round(short.rate, 1),
        events_per_s=round(long.rate * LONG_ANSWER, 1),
        prompt_tokens_per_s=round(prompts.rate * LONG_PROMPT, 1),
        requests_per_core_s=round(short.rate / short.summary["client_cpu"], 1),
        events_per_core_s=round(long.rate * LONG_ANSWER / long.summary["client_cpu"], 1),
        at_rates=[_at_rate(rate, 2 * seconds, procs, folder, tell) for rate in RATES],
    )


def _at_rate(rate: float, seconds: float, procs: int, folder: Path, tell: Callable[[str], None]) -> RateTruth:
    tell(f"{rate:g} requests/s, for {seconds:g} s")
    flags = ["--rate", f"{rate:g}", "--duration", f"{seconds:g}"]
    run = _run(folder / f"rate-{rate:g}", PACED, [*flags, *_shape(PACED_ANSWER, SHORT_PROMPT), *_procs(procs)])
    errors_ms = ttft_errors_ms(run.truth.served, told_ttfts_ns(run.folder / "trace.jsonl", run.truth))
    lag = run.summary["lag"] or {}
    return RateTruth(
        rate=rate,
        requests=len(run.truth.served),
        ttft_error_p50_ms=_rounded(quantile(errors_ms, 0.5)),
        ttft_error_p99_ms=_rounded(quantile(errors_ms, 0.99)),
        lag_p50_ms=lag.get("p50_ms"),
        lag_p99_ms=lag.get("p99_ms"),
        client_cpu=run.summary["client_cpu"],
    )


def told_ttfts_ns(trace: Path, truth: Truth) -> dict[str, float]:
    """What a client's trace says the first tokens took, by the ids that the server saw: a trace has them keyed."""
    key = load_key()
    _, records = load_trace(trace)
    told = {str(record.request_id): record.ttft_ms for record in records}
    found = ((one.request_id, told.get(keyed_id(key, "request", one.request_id))) for one in truth.served)
    return {name: ttft_ms * 1e6 for name, ttft_ms in found if ttft_ms is not None}


def _run(folder: Path, server_flags: Sequence[str], flags: Sequence[str]) -> Run:
    """One ``loadgen`` against a server of its own; raises InputError with its words if it fails."""
    folder.mkdir()
    summary = folder / "summary.json"
    with truth_server(server_flags) as server:
        command = [sys.executable, "-m", "loadgen", "--url", server.url, "--trace", str(folder / "trace.jsonl")]
        command += ["--json", str(summary), "--pattern", "constant", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
        if done.returncode:
            raise InputError(f"calibrate: loadgen failed here: {done.stderr.strip()[-500:]}; expected it to run")
        return Run(server.truth(), msgspec.json.decode(summary.read_bytes()), folder)


def _shape(answer: int, prompt: int) -> list[str]:
    return ["--output-tokens", str(answer), "--prompt-tokens", str(prompt)]


def _procs(procs: int) -> list[str]:
    return ["--procs", str(procs)] if procs > 1 else []


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
