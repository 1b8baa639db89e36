"""Loads sized to an engine that was never measured: a short probe, then rates at which its cold cache keeps up.

They are kept in ``SHAPE/loads.json`` beside the captures, so that an interrupted round goes on with the same loads and
``scripts.matrix judge`` knows them.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import httpx
import msgspec
import numpy as np

from loadgen.loadflags import parse_config
from loadgen.plan.stages import round_of
from scripts.fidelity.engines import served_model
from scripts.fidelity.loads import LOADS, ORDER, SCHEDULERS, Rates, one_round

COLD_UTILIZATION = 0.6
"""Of each load without its cache, by the probe: below saturation."""
GATES = "session-fast poisson-long burst"
SIZED_ORDER = (
    f"warm: calibration-1 {GATES}",
    f"cold-replayed: {GATES}",
    "warm: calibration-2",
    f"again: {GATES}",
    "warm: calibration-3",
    f"again-2: {GATES}",
    f"uncached: {GATES}",
    f"uncached-again: {GATES}",
)
"""The most valuable first: with the first two lines alone there is a forecast to judge, warm and cold."""
SHORT, LONG, OUTPUTS = 64, 8192, 64
AT_ONCE = 16
REPEATS = 3
EVERY_S, SESSIONS_S = 8.0, 60
TURNS = 5
COLD_SESSION, COLD_SINGLE, ANSWER = 10_600, 2_270, 40
"""Tokens of a middle prompt and output of the session gate and of the others: see ``one_round``."""
LONGEST_PROMPT = 24_000
SEED = 300


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Times of an idle engine, ms."""

    short_ms: float
    """Of a cold prompt of ``SHORT`` tokens with one output token."""
    long_ms: float
    """Of one of ``LONG`` tokens."""
    output_ms: float
    """Of one output token, ``AT_ONCE`` requests being generated at once: their time over all their tokens."""

    def service_ms(self, prompt_tokens: int, output_tokens: int) -> float:
        """Engine time of one request, cold."""
        per_token_ms = max(self.long_ms - self.short_ms, 0.0) / (LONG - SHORT)
        return self.short_ms + prompt_tokens * per_token_ms + output_tokens * self.output_ms


class SizedLoads(msgspec.Struct, frozen=True, kw_only=True):
    """File of one model's loads."""

    probe: Probe
    loads: dict[str, str]
    order: tuple[str, ...]
    scheduler: tuple[str, ...]


def probe_engine(url: str) -> Probe:
    """Measure an idle engine, in seconds."""
    model, draws = served_model(url), np.random.default_rng(SEED)

    def completed_ms(prompt_tokens: int, output_tokens: int = 1) -> float:
        prompt = draws.integers(1000, 100_000, prompt_tokens).tolist()
        body = {"model": model, "prompt": prompt, "ignore_eos": True}
        began = time.perf_counter()
        client.post("/v1/completions", json={**body, "max_tokens": output_tokens}).raise_for_status()
        return 1000.0 * (time.perf_counter() - began)

    with httpx.Client(base_url=url, timeout=120.0) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        completed_ms(LONG)  # warms the engine up
        short_ms, long_ms = (median(completed_ms(tokens) for _ in range(REPEATS)) for tokens in (SHORT, LONG))
        began = time.perf_counter()
        list(pool.map(lambda _: completed_ms(SHORT, OUTPUTS), range(AT_ONCE)))
        output_ms = 1000.0 * (time.perf_counter() - began) / (AT_ONCE * OUTPUTS)
    return Probe(short_ms=round(short_ms, 2), long_ms=round(long_ms, 2), output_ms=round(output_ms, 4))


def sized_loads(probe: Probe, scheduler: Sequence[str], cache_tokens: int, context: int) -> SizedLoads:
    """Return calibrations and gates for an engine of this speed and size."""
    session_ms, single_ms = (probe.service_ms(tokens, ANSWER) for tokens in (COLD_SESSION, COLD_SINGLE))
    at_once = int(scheduler[scheduler.index("--max-num-seqs") + 1])
    longest = min(LONGEST_PROMPT, context * 2 // 3, cache_tokens * 2 // 5)
    calibration = f"--prompt-tokens 64:{longest} --parallel {min(at_once, 64)}"
    rates = Rates(
        calibration=f"{calibration} --number {sessions_in_a_round(calibration)}",
        sessions=_rounded(1000.0 * COLD_UTILIZATION / (session_ms * TURNS)),
        sessions_s=SESSIONS_S,
        singles=_rounded(1000.0 * COLD_UTILIZATION / single_ms),
        burst=max(4, min(at_once, round(1000.0 * EVERY_S * COLD_UTILIZATION / single_ms))),
    )
    loads = one_round(SEED, rates)
    del loads["session-short"]
    return SizedLoads(probe=probe, loads=loads, order=SIZED_ORDER, scheduler=tuple(scheduler))


def sessions_in_a_round(calibration: str) -> int:
    """Sessions of every stage of a calibration load once."""
    config = parse_config(["--url", "http://engine", "-o", "trace", "--pattern", "calibration", *calibration.split()])
    return sum(len(outline.sessions) for outline in round_of(config, 0))


def _rounded(rate: float) -> float:
    return float(f"{rate:.2g}")


def loads_path(out: Path, shape: str) -> Path:
    """Path of a model's sized loads."""
    return out / shape / "loads.json"


def keep_sized_loads(out: Path, shape: str, found: SizedLoads) -> None:
    """Write the loads of a model, and add them."""
    path = loads_path(out, shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    add_sized_loads(out)


def add_sized_loads(captures: Path) -> None:
    """Add the loads of models that were sized, as a folder of captures has them, to the matrix."""
    for path in sorted(captures.glob("*/loads.json")):
        found = msgspec.json.decode(path.read_bytes(), type=SizedLoads)
        shape = path.parent.name
        LOADS[shape], ORDER[shape], SCHEDULERS[shape] = found.loads, found.order, found.scheduler
