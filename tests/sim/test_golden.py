"""Digests of the simulator's outputs, over every rule: a change of form leaves each of them as it is.

After a change that is meant: ``python -m tests.sim.test_golden --write``, with ``KVTAPE_MOONCAKE`` naming
conversation_trace.jsonl for the published hour. A line of ``golden_cases.txt`` is a name and the command's arguments.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sim.__main__ import main
from sim.latency.modelfile import make_model, save_model
from sim.latency.noise import LEVELS, Noise
from sim.vllm.config import EngineConfig
from tracefile.files.writing import TraceWriter
from tracefile.records.schema import BlockHash, Meta, Record, RequestId, SessionId

HERE = Path(__file__).parent
GOLDEN = HERE / "data" / "golden.json"
CAPTURES = HERE.parents[1] / "data" / "captures"
MOONCAKE = os.environ.get("KVTAPE_MOONCAKE")
BLOCK = 16
UNSTABLE = ("validation", "version", "model_digest")
COSTS = {
    "t0_ms": 4.3,
    "per_prefill_token_ms": 0.013,
    "per_attention_token2_ms": 1e-5,
    "per_decode_ms": 0.99,
    "per_kv_token_ms": 3e-5,
    "per_repeated_kv_token_ms": 1e-5,
    "per_prefill_chunk_ms": 0.7,
    "per_prefill_depth_ms": 2e-4,
    "per_chunk_square_ms": 3e-6,
    "prefill_step_ms": 0.31,
    "rested_step_ms": 1.9,
    "per_rested_depth_ms": 0.002,
    "frontend_base_ms": 1.7,
    "frontend_ms_per_prompt_token": 0.004,
    "delivery_ms_per_prompt_token": 0.003,
}
NOISE = Noise(
    step_ms=(6.0, 16.0, 40.0),
    step_log_ratio=tuple(tuple(0.03 * (level - 7 + row) for level in range(len(LEVELS))) for row in range(3)),
    autocorrelated_share=0.4,
    correlation_time_ms=100.0,
    frontend_log_ratio=tuple(0.05 * (level - 7) for level in range(len(LEVELS))),
)
ENGINE = EngineConfig(
    num_gpu_blocks=1500, block_size=BLOCK, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=8192
)
POLICY = "def choose(request, engines):\n    return min(range(len(engines)), key=lambda n: engines[n].prefill_tokens)\n"
GRID = "[base]\nreplicas = 2\n[axes]\nreplicas = [1, 2]\nroute = ['round-robin', 'cost']\nnum-gpu-blocks = [300, 900]\n"


class RandomLoad:
    """Conversations on shared beginnings; aborts, errors, failed parents, prompts that no engine serves."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.records: list[Record] = []
        self.beginnings = [self.fresh(length) for length in (3, 12, 40, 70)]

    def fresh(self, blocks: int) -> list[BlockHash]:
        return [BlockHash(self.rng.getrandbits(64)) for _ in range(blocks)]

    def write(
        self, path: Path, requests: int, spacing_ms: float, most_blocks: int = 160, most_output: int = 80
    ) -> None:
        self.most_blocks, self.most_output = most_blocks, most_output
        for number in range(requests):
            self.records.append(self.record(number, requests * spacing_ms))
        with TraceWriter(path, Meta(source="tap", model="tiny", block_size=BLOCK)) as writer:
            for record in sorted(self.records, key=lambda record: record.arrival_ms or 0.0):
                writer.write(record)

    def record(self, number: int, duration_ms: float) -> Record:
        rng = self.rng
        parent = rng.choice(self.records[-40:]) if self.records and rng.random() < 0.5 else None
        shared = rng.choice(self.beginnings)
        if parent is not None and rng.random() < 0.9:
            shared = [*(parent.block_hashes or []), *(parent.output_block_hashes or [])][: self.most_blocks]
        prompt = len(shared) * BLOCK + rng.choice([1, 15, 16, 17, 200, rng.randrange(1, 1500)])
        prompt = 9_000 if rng.random() < 0.02 and self.most_blocks > 100 else prompt
        output = rng.choice([1, 2, rng.randrange(1, self.most_output)])
        chain = shared + self.fresh((prompt + output - 1) // BLOCK - len(shared))
        record = Record(
            request_id=RequestId(f"r{number}"),
            session_id=parent.session_id if parent else SessionId(f"s{number}"),
            turn=(parent.turn or 1) + 1 if parent else 1,
            arrival_ms=round(rng.uniform(0.0, duration_ms), rng.choice([-1, 0, 3])),
            upstream=f"http://engine{rng.randrange(3)}",
            stream=rng.random() < 0.8,
            finish_reason=rng.choice(["stop", "length"]),
            prompt_logprobs=rng.random() < 0.04 or None,
            prompt_tokens=prompt,
            output_tokens=output,
            block_hashes=chain[: prompt // BLOCK],
            output_block_hashes=chain[prompt // BLOCK :] if rng.random() < 0.8 else None,
        )
        if parent is not None:
            record.parent_id, record.think_ms = parent.request_id, rng.choice([0.0, rng.uniform(0.0, 300.0)])
            record.arrival_ms = (parent.arrival_ms or 0.0) + rng.uniform(0.0, 400.0)
        if rng.random() < 0.1:
            record.status, record.e2e_ms, record.max_tokens = "client_abort", rng.uniform(0.0, 600.0), 90
        elif rng.random() < 0.05:
            record.status, record.http_status, record.e2e_ms = "error", rng.choice([429, 500]), 1.5
        return record


def make_inputs(folder: Path) -> None:
    """Write the traces and models that the cases name."""
    RandomLoad(1).write(folder / "mixed.jsonl", 260, 35.0)
    RandomLoad(2).write(folder / "fleet.jsonl", 400, 12.0)
    RandomLoad(3).write(folder / "idle.jsonl", 60, 400.0)
    RandomLoad(4).write(folder / "chats.jsonl", 300, 20.0, most_blocks=70)
    RandomLoad(5).write(folder / "answers.jsonl", 150, 60.0, most_blocks=20, most_output=600)
    for placement in ("parallel", "serial", "shared_core"):
        save_model(make_model(COSTS, ENGINE, NOISE, placement), folder / f"{placement}.json")
    few = {name: COSTS[name] for name in ("t0_ms", "per_prefill_token_ms", "per_decode_ms", "frontend_base_ms")}
    save_model(make_model(few, ENGINE), folder / "few_terms.json")
    slow = replace(ENGINE, num_gpu_blocks=900, max_num_seqs=8, max_num_batched_tokens=256, async_scheduling=True)
    save_model(make_model({name: 2.0 * cost for name, cost in COSTS.items()}, slow, NOISE), folder / "slow.json")
    hour = replace(ENGINE, num_gpu_blocks=10_000, block_size=512, max_model_len=None, max_num_batched_tokens=8192)
    save_model(make_model({**COSTS, "t0_ms": 12.0}, replace(hour, max_num_seqs=256), NOISE), folder / "hour.json")
    (folder / "mine.py").write_text(POLICY)
    (folder / "grid.toml").write_text(GRID)
    (folder / "sweep.toml").write_text("[sim.sweep]\nprocs = 1\n")
    (folder / "captures").symlink_to(CAPTURES)
    (folder / "fitted.json").symlink_to(HERE / "data" / "fitted_256x4.json")
    if MOONCAKE:
        (folder / "mooncake.jsonl").symlink_to(Path(MOONCAKE).resolve())


def read_cases() -> dict[str, list[str]]:
    lines = (HERE / "data" / "golden_cases.txt").read_text().splitlines()
    cases = {words[0]: words[1:] for line in lines if (words := line.split()) and not line.startswith("#")}
    return {name: words for name, words in cases.items() if MOONCAKE or "mooncake.jsonl" not in words}


def digest_of(words: list[str]) -> str:
    """Run a command in the working folder; return the digest of its exit code, its JSON and the file it writes."""
    output = Path({"run": "out.jsonl", "calibrate": "out.json"}.get(words[0], "none"))
    named = ["-o", str(output), "--overwrite"] if output.suffix else []
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        code = main([*words, *named, "--json"])
    shown = printed.getvalue()
    parts = [str(code), canonical(shown) if shown.startswith("{") else shown]
    if output.suffix:
        header, _, records = output.read_text().partition("\n" if words[0] == "run" else "no such text")
        parts += [canonical(header), records]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def canonical(text: str) -> str:
    """Return JSON without version-dependent fields; linear algebra differs by machine in the last digits."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: kept(item) for name, item in value.items() if name not in UNSTABLE}
        if isinstance(value, list):
            return [kept(item) for item in value]
        return float(f"{value:.9e}") if isinstance(value, float) else value

    return json.dumps(kept(json.loads(text)), sort_keys=True)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        make_inputs(Path(name))
        yield Path(name)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", read_cases())
def test_output_equals_the_golden_digest(name: str) -> None:
    assert digest_of(read_cases()[name]) == json.loads(GOLDEN.read_text())[name]


if __name__ == "__main__":
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        make_inputs(Path(scratch))
        digests = {name: digest_of(words) for name, words in read_cases().items()}
    print(*(name for name in digests if golden.get(name) != digests[name]), sep="\n")
    if sys.argv[1:] == ["--write"]:
        GOLDEN.write_text(json.dumps(golden | digests, indent=1) + "\n")
