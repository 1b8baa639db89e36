"""Synthetic traces with known shape: sessions on a shared prefix, slow first turns, quick later ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tracefile.files.writing import TraceWriter
from tracefile.records.schema import Engine, Meta, Record, RequestId, SessionId, Workload

MakeTrace = Callable[..., Path]


def session_records(sessions: int, turns: int, *, slower: float, cold: bool, seed: int) -> list[Record]:
    """``sessions`` conversations of ``turns`` requests; ``slower`` scales every time, ``cold`` drops the cache."""
    generator = np.random.default_rng(0)
    jitter = np.random.default_rng(seed)
    records = []
    clock_ms = 0.0
    for session in range(sessions):
        clock_ms += float(generator.exponential(400.0))
        at_ms, prompt = clock_ms, 9_000
        for turn in range(1, turns + 1):
            prompt += int(generator.integers(100, 400))
            cached = 0 if cold or (turn == 1 and session < 2) else (prompt - 300) // 32 * 32
            noise = float(jitter.lognormal(0.0, 0.12))
            ttft_ms = slower * noise * (20.0 + 0.08 * (prompt - cached))
            gaps = [float(gap) for gap in jitter.gamma(9.0, 1.0, size=24) * slower]
            e2e_ms = ttft_ms + sum(gaps)
            aborted = turn == turns and session % 11 == 10
            records.append(
                Record(
                    request_id=RequestId(f"r{session:04}-{turn}"),
                    session_id=SessionId(f"s{session:04}"),
                    session_source="explicit",
                    turn=turn,
                    arrival_ms=at_ms,
                    ttft_ms=None if aborted else ttft_ms,
                    itl_ms=[] if aborted else gaps,
                    itl_tokens=[] if aborted else [1] * len(gaps),
                    e2e_ms=0.6 * ttft_ms if aborted else e2e_ms,
                    status="client_abort" if aborted else "ok",
                    stream=True,
                    prompt_tokens=prompt,
                    output_tokens=None if aborted else 25,
                    cached_tokens=None if aborted else cached,
                    concurrency=1 + session % 5,
                )
            )
            at_ms += e2e_ms + float(generator.exponential(1_000.0))
            prompt += 25
    return records


@pytest.fixture
def make_trace(tmp_path: Path) -> MakeTrace:
    """A factory of traces on disk: ``make_trace("name", source="sim", sessions=…, turns=…, slower=…, cold=…)``."""

    def make(
        name: str,
        *,
        source: str = "tap",
        sessions: int = 24,
        turns: int = 5,
        slower: float = 1.0,
        cold: bool = False,
        seed: int = 0,
        fit_digests: object = None,
        source_digest: str | None = None,
    ) -> Path:
        path = tmp_path / f"{name}.jsonl"
        meta = Meta(
            source=source,  # type: ignore[arg-type]
            model="qwen3-tiny",
            block_size=32,
            epoch_unix_ns=1_760_000_000_000_000_000,
            engine=Engine(name="vllm", version="0.32.0", block_size=32, enable_prefix_caching=True),
            workload=Workload(pattern="multiturn", seed=seed, cold_prompts=cold or None, source_digest=source_digest),
            extra={} if fit_digests is None else {"fit_digests": fit_digests},
        )
        with TraceWriter(path, meta) as writer:
            for record in session_records(sessions, turns, slower=slower, cold=cold, seed=seed):
                writer.write(record)
        return path

    return make
