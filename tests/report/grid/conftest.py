"""Sweeps with known numbers: every session has two turns of 11 tokens, and a slot runs one session after another."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from measure.sweepindex import SweepRun, write_sweep
from tracefile.files.writing import TraceWriter
from tracefile.records.schema import BlockHash, Engine, Meta, Record, RequestId, SessionId

SESSIONS_A_SLOT = 5


@dataclass(frozen=True, slots=True)
class Pace:
    """A run: TTFT, the gap between tokens, and the share of turn 2's eligible tokens that hit."""

    ttft_ms: float = 100.0
    gap_ms: float = 20.0
    cached_tokens: int = 96
    fails: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 96


def write_run(path: Path, slots: int, pace: Pace) -> None:
    engine = Engine(name="vllm", version="0.32.0", block_size=16)
    meta = {"source": "client", "model": "tiny", "block_size": 16, "engine": engine, **pace.meta}
    with TraceWriter(path, Meta(**meta)) as writer:
        for slot in range(slots):
            for number in range(SESSIONS_A_SLOT):
                for record in _session(slot, number, pace):
                    writer.write(record)


def _session(slot: int, number: int, pace: Pace) -> list[Record]:
    e2e_ms = pace.ttft_ms + 10 * pace.gap_ms
    first = number * 2 * e2e_ms
    chain = [BlockHash(slot << 20 | number << 10 | block) for block in range(pace.prompt_tokens // 16 + 1)]
    return [
        Record(
            request_id=RequestId(f"r{slot}-{number}-{turn}"),
            session_id=SessionId(f"s{slot}-{number}"),
            turn=turn,
            arrival_ms=first + (turn - 1) * e2e_ms,
            ttft_ms=pace.ttft_ms,
            itl_ms=[pace.gap_ms] * 10,
            itl_tokens=[1] * 10,
            e2e_ms=e2e_ms,
            status="error" if pace.fails else "ok",
            stream=True,
            prompt_tokens=pace.prompt_tokens + 16 * (turn - 1),
            output_tokens=11,
            cached_tokens=pace.cached_tokens * (turn - 1),
            block_hashes=chain[: pace.prompt_tokens // 16 + turn - 1],
        )
        for turn in (1, 2)
    ]


MakeSweep = Callable[..., Path]


@pytest.fixture
def make_sweep(tmp_path: Path) -> MakeSweep:
    """A factory of folders: ``make_sweep({"A": {8: [Pace()]}}, name="x", of="parallel")``; a pace for each repeat."""

    def make(
        labels: Mapping[str, Mapping[float, Sequence[Pace | str]]], name: str = "sweep", of: str = "parallel"
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        runs = []
        for label, loads in labels.items():
            for load, repeats in loads.items():
                for repeat, pace in enumerate(repeats, 1):
                    run = f"{label.replace('/', '-')}-{load:g}-r{repeat}"
                    status: Any = pace if isinstance(pace, str) else "done"
                    if isinstance(pace, Pace):
                        write_run(folder / f"{run}.jsonl", round(load) if of == "parallel" else 2, pace)
                    runs.append(
                        SweepRun(
                            run=run,
                            label=label,
                            parallel=round(load) if of == "parallel" else None,
                            rate=load if of == "rate" else None,
                            repeat=repeat,
                            trace=f"{run}.jsonl",
                            status=status,
                            reason=None if status == "done" else "killed",
                            command="",
                            started="",
                            duration_s=1.0,
                        )
                    )
        write_sweep(folder, runs)
        return folder

    return make


A = {8: [Pace(gap_ms=20.0)], 16: [Pace(gap_ms=40.0, cached_tokens=48)]}
"""293.33 tok/s at 50 tok/s per user, 352 at 25; sessions of 0.6 and 1 s."""
B = {8: [Pace(gap_ms=10.0)], 16: [Pace(gap_ms=25.0)]}
"""440 tok/s at 100 tok/s per user, 502.86 at 40; sessions of 0.4 and 0.7 s."""
