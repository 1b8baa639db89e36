"""Loads of a round, sized for an engine: three calibrations to fit on, and gates that no fit uses.

A short probe of the idle engine measures its speed; rates are below saturation without prefix hits. ``loads.json``
beside the captures has the loads, so that an interrupted round continues with the same loads.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Literal, get_args

import httpx
import msgspec
import numpy as np

from loadgen.loadflags import parse_config
from loadgen.plan.stages import round_of

Way = Literal["warm", "again", "again-2", "cold-replayed", "uncached", "uncached-again", "small", "replayed"]
"""Conditions of a capture: empty cache; repeated once or twice (A/A); replayed with different tokens in every prompt;
with prefix caching off, once or twice. Earlier rounds also have a small pool and plain replays."""
SCHEDULER = ("--max-num-seqs", "32", "--max-num-batched-tokens", "2048")
"""Settings of scripts/vllm_engine.py, which vLLM does not report."""
GATES = "session-fast poisson-long burst"
ORDER = (
    f"warm: calibration-1 {GATES}",
    f"cold-replayed: {GATES}",
    "warm: calibration-2",
    f"again: {GATES}",
    "warm: calibration-3",
    f"again-2: {GATES}",
    f"uncached: {GATES}",
    f"uncached-again: {GATES}",
)
"""Most important first: after the first two lines, a warm and a cold forecast can be evaluated."""
COLD_UTILIZATION = 0.6
"""Utilization of each load without prefix hits, by the probe."""
SHORT, LONG, OUTPUTS, AT_ONCE, REPEATS = 64, 8192, 64, 16, 3
BURST_EVERY_S, BURST_S, SESSIONS_S, TURNS = 8.0, 0.01, 60, 5
COLD_SESSION, COLD_SINGLE, ANSWER = 10_600, 2_270, 40
"""Tokens of a typical prompt and output of the session gate and of the other gates."""
LONGEST_PROMPT = 24_000
SEED = 300


class Capture(msgspec.Struct, frozen=True):
    """A trace of a round."""

    load: str
    way: Way = "warm"

    @property
    def name(self) -> str:
        return self.load if self.way == "warm" else f"{self.load}-{self.way}"

    @property
    def prefix_caching(self) -> bool:
        """The capture needs an engine with prefix caching."""
        return not self.way.startswith("uncached")


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of an idle engine, in ms."""

    short_ms: float
    """E2E latency of a cold prompt of ``SHORT`` tokens with one output token."""
    long_ms: float
    """E2E latency of a cold prompt of ``LONG`` tokens with one output token."""
    output_ms: float
    """Time per output token with ``AT_ONCE`` concurrent requests: total time over all tokens."""

    def service_ms(self, prompt_tokens: int, output_tokens: int) -> float:
        """Return the engine time (prefill and decode) of a cold request, in ms."""
        per_token_ms = max(self.long_ms - self.short_ms, 0.0) / (LONG - SHORT)
        return self.short_ms + prompt_tokens * per_token_ms + output_tokens * self.output_ms


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``loads.json``."""

    loads: dict[str, str]
    """loadgen flags by load."""
    order: tuple[str, ...] = ORDER
    scheduler: tuple[str, ...] = SCHEDULER

    def captures(self) -> list[Capture]:
        """Return all captures, most important first."""
        lines = [line.partition(": ") for line in self.order]
        return [Capture(load, as_way(way)) for way, _, loads in lines for load in loads.split()]


def as_way(name: str) -> Way:
    return next(way for way in get_args(Way) if way == name)


def capture_named(name: str) -> Capture:
    ways = sorted(get_args(Way), key=len, reverse=True)
    way: Way = next((way for way in ways if name.endswith(f"-{way}")), "warm")
    return Capture(name.removesuffix(f"-{way}"), way)


def read_round(folder: Path) -> Round | None:
    """Return the round of a folder; None: not sized yet."""
    path = folder / "loads.json"
    return msgspec.json.decode(path.read_bytes(), type=Round) if path.exists() else None


def write_round(folder: Path, sized: Round) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "loads.json").write_bytes(msgspec.json.format(msgspec.json.encode(sized), indent=1) + b"\n")


def probe_engine(url: str, model: str) -> Probe:
    """Measure the latency of an idle engine."""
    draws = np.random.default_rng(SEED)

    def completed_ms(prompt_tokens: int, output_tokens: int = 1) -> float:
        prompt = draws.integers(1000, 100_000, prompt_tokens).tolist()
        body = {"model": model, "prompt": prompt, "ignore_eos": True, "max_tokens": output_tokens}
        began = time.perf_counter()
        client.post("/v1/completions", json=body).raise_for_status()
        return 1000.0 * (time.perf_counter() - began)

    with httpx.Client(base_url=url, timeout=120.0) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        completed_ms(LONG)  # warms the engine up
        short_ms, long_ms = (median(completed_ms(tokens) for _ in range(REPEATS)) for tokens in (SHORT, LONG))
        began = time.perf_counter()
        list(pool.map(lambda _: completed_ms(SHORT, OUTPUTS), range(AT_ONCE)))
        output_ms = 1000.0 * (time.perf_counter() - began) / (AT_ONCE * OUTPUTS)
    return Probe(short_ms=round(short_ms, 2), long_ms=round(long_ms, 2), output_ms=round(output_ms, 4))


def sized_round(probe: Probe, scheduler: Sequence[str], cache_tokens: int, context: int) -> Round:
    """Return calibrations and gates for an engine with this speed and KV cache size."""
    session_ms, single_ms = (probe.service_ms(tokens, ANSWER) for tokens in (COLD_SESSION, COLD_SINGLE))
    at_once = int(scheduler[scheduler.index("--max-num-seqs") + 1])
    longest = min(LONGEST_PROMPT, context * 2 // 3, cache_tokens * 2 // 5)
    calibration = f"--prompt-tokens 64:{longest} --parallel {min(at_once, 64)}"
    calibration += f" --number {sessions_in_a_round(calibration)}"
    sessions = _rounded(1000.0 * COLD_UTILIZATION / (session_ms * TURNS))
    singles = _rounded(1000.0 * COLD_UTILIZATION / single_ms)
    burst = max(4, min(at_once, round(1000.0 * BURST_EVERY_S * COLD_UTILIZATION / single_ms)))
    single = "--prefix-count 4 --prefix-tokens 2000 --prompt-tokens 32:500 --output-tokens 8:64"
    loads = {f"calibration-{k}": f"--pattern calibration {calibration} --seed {SEED + k}" for k in (1, 2, 3)}
    loads |= {
        "session-fast": f"--pattern multiturn --turns {TURNS} --think 0.2s:1.0s --prefix-count 2 --prefix-tokens 10000 "
        f"--prompt-tokens 64:256 --output-tokens 16:64 --rate {sessions:g} --duration {SESSIONS_S}s --seed {SEED + 4}",
        # 330 requests: enough for p99.
        "poisson-long": f"--pattern poisson {single} --rate {singles:g} --number 330 --seed {SEED + 6}",
        "burst": f"{bursts(burst)} {single} --seed {SEED + 7}",
    }
    return Round(loads=loads, scheduler=tuple(scheduler))


def bursts(size: int) -> str:
    """Return loadgen flags of six bursts of about ``size`` requests."""
    starts = [BURST_EVERY_S * burst for burst in range(6)]
    rates = [f"{start:g}:{size / BURST_S:g},{start + BURST_S:g}:0" for start in starts]
    return f"--pattern series --rate-series {','.join([*rates, f'{6 * BURST_EVERY_S:g}:0'])}"


def sessions_in_a_round(calibration: str) -> int:
    """Count the sessions of a round of the calibration load."""
    config = parse_config(["--url", "http://engine", "-o", "trace", "--pattern", "calibration", *calibration.split()])
    return sum(len(outline.sessions) for outline in round_of(config, 0))


def _rounded(rate: float) -> float:
    return float(f"{rate:.2g}")
