"""Captures of a known engine in virtual time: designed loads and sessions, with noise and a speed of each capture.

The simulator is the engine, so that ``sim calibrate`` and ``sim validate`` are judged for their statistics alone.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from scipy.special import ndtri

from sim.engine.results import EngineResults, Results, finished_records
from sim.engine.simulation import simulate
from sim.latency.modelfile import Model, default_model
from sim.latency.noise import LEVELS, Noise
from sim.workload.arrivals import plan_arrivals
from tests.sim.synthetic import engine_of
from tracefile.files.writing import TraceWriter
from tracefile.records.schema import BlockHash, Meta, Record, RequestId, SessionId

BLOCK = 32
SPREAD = 0.1
SESSIONS, TURNS = 30, 4


def reported_engine() -> Model:
    """Return the built-in engine with steps and an API server that vary by 10 %, three tenths of it for a second."""
    table = tuple((SPREAD * ndtri(np.array(LEVELS))).tolist())
    noise = Noise(step_log_ratio=(table,), autocorrelated_share=0.3, correlation_time_ms=1e3, frontend_log_ratio=table)
    return msgspec.structs.replace(default_model(), noise=noise)


class Blocks:
    """Block hashes of this prompt only."""

    def __init__(self) -> None:
        self._last = 0

    def extend(self, chain: list[BlockHash], tokens: int) -> list[BlockHash]:
        """Return ``chain`` continued over the full blocks of ``tokens``."""
        first, lacking = self._last + 1, max(tokens // BLOCK - len(chain), 0)
        self._last += lacking
        return chain[: tokens // BLOCK] + [BlockHash(number) for number in range(first, first + lacking)]


def calibration(seed: int) -> Iterator[Record]:
    """Yield prompts of many sizes alone, each sent again and longer; then concurrent prompts and outputs."""
    random, blocks, now_ms = np.random.default_rng(seed), Blocks(), 0.0
    for number in range(24):
        tokens, output = round(64 * (11_000 / 64) ** (number / 23)), int(random.integers(8, 40))
        chain = blocks.extend([], tokens + output)
        yield _request((f"cold{number}", f"s{number}"), now_ms, tokens, output, chain)
        more = tokens + output + int(random.choice([20, 200, 1_500]))
        yield _request((f"warm{number}", f"s{number}"), now_ms + 3e3, more, 16, blocks.extend(chain, more + 16))
        now_ms += 5e3
    for number in range(60):
        tokens, output = int(random.choice([100, 700, 2_500, 6_000])), int(random.integers(2, 90))
        yield _request((f"mixed{number}", f"m{number}"), now_ms, tokens, output, blocks.extend([], tokens + output))
        now_ms += random.exponential(500.0)


def sessions(seed: int) -> Iterator[Record]:
    """Yield sessions of several turns on two prefixes of 3,000 tokens, which begin at random."""
    random, blocks, now_ms = np.random.default_rng(seed), Blocks(), 0.0
    prefixes = [blocks.extend([], 3_000) for _ in range(2)]
    for number in range(SESSIONS):
        tokens, chain, parent = 3_000, prefixes[number % 2], None
        for turn in range(1, TURNS + 1):
            tokens, output = tokens + int(random.integers(64, 256)), int(random.integers(16, 64))
            chain = blocks.extend(chain, tokens + output)
            name, at_ms = f"s{number}t{turn}", now_ms + 2e3 * (turn - 1)
            record = _request((name, f"s{number}"), at_ms, tokens, output, chain)
            if parent is not None:
                record.parent_id, record.think_ms = parent, float(random.uniform(200.0, 1e3))
            record.turn, parent, tokens = turn, record.request_id, tokens + output
            yield record
        now_ms += random.exponential(1.5e3)


def steady(seed: int, per_s: float, requests: int) -> Iterator[Record]:
    """Yield short requests that share nothing, at random times."""
    random, blocks, now_ms = np.random.default_rng(seed), Blocks(), 0.0
    for number in range(requests):
        tokens, output = int(random.integers(64, 256)), int(random.integers(8, 24))
        yield _request((f"r{number}", f"r{number}"), now_ms, tokens, output, blocks.extend([], tokens + output))
        now_ms += random.exponential(1e3 / per_s)


def _request(ids: tuple[str, str], arrival_ms: float, tokens: int, output: int, chain: list[BlockHash]) -> Record:
    return Record(
        request_id=RequestId(ids[0]),
        session_id=SessionId(ids[1]),
        arrival_ms=arrival_ms,
        e2e_ms=1.0,
        stream=True,
        max_tokens=output,
        prompt_tokens=tokens,
        output_tokens=output,
        block_hashes=chain[: tokens // BLOCK],
        output_block_hashes=chain[tokens // BLOCK : (tokens + output - 1) // BLOCK],
    )


def capture(path: Path, load: Iterator[Record], engine: Model, seed: int) -> Path:
    """Write the trace that a tap before the engine records of the load."""
    meta = Meta(source="tap", block_size=BLOCK, engine=engine_of(engine))
    arrivals = plan_arrivals(meta, list(load), BLOCK, replay_sessions=True)
    run = simulate(arrivals, engine.engine, engine, seed)
    results = EngineResults(run.requests, np.arange(len(arrivals)), run.engine.delivered_ms)
    return write(path, meta, finished_records(Results(arrivals, [results]), BLOCK))


def write(path: Path, meta: Meta, records: Iterable[Record]) -> Path:
    with TraceWriter(path, meta) as writer:
        for record in records:
            writer.write(record)
    return path
