"""``--evict`` of commands, on six requests by hand: under LFU the last one hits what vLLM's rule has evicted."""

import json
from pathlib import Path

import pytest

from sim.__main__ import main
from sim.latency.modelfile import make_model, save_model
from sim.vllm.config import EngineConfig
from tests.jsonoutput import json_of
from tracefile import BlockHash, Meta, Record, RequestId, TraceWriter

BY_HAND = {"vllm": 1, "lfu": 2}
"""Requests that hit their one full block, of 32 tokens of 33, in three usable blocks. Each needs a second block. A hits
at once. C takes the place of A, the least recently used, or of B, the least often used; D that of B, or of C."""
TOKENS = 6 * 33


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evict")
    with TraceWriter(path / "six.jsonl", Meta(block_size=32)) as writer:
        for number, letter in enumerate("AABCDA"):
            writer.write(
                Record(
                    request_id=RequestId(f"r{number}"),
                    arrival_ms=10_000.0 * number,
                    e2e_ms=50.0,
                    prompt_tokens=33,
                    output_tokens=1,
                    block_hashes=[BlockHash(ord(letter))],
                )
            )
    costs = {"t0_ms": 1.0, "per_prefill_token_ms": 1.0, "per_decode_ms": 0.1, "frontend_base_ms": 1.0}
    save_model(make_model(costs, EngineConfig(num_gpu_blocks=4, block_size=32)), path / "model.json")
    return path


def words(folder: Path, command: str, *flags: str) -> list[str]:
    return [command, str(folder / "six.jsonl"), "--latency-model", str(folder / "model.json"), "--members", "2", *flags]


@pytest.mark.parametrize("evict", BY_HAND)
def test_misses_are_those_of_the_policy(folder: Path, evict: str) -> None:
    found = json_of(main, ["misses", str(folder / "six.jsonl"), "--num-gpu-blocks", "4", "--evict", evict])
    hits = BY_HAND[evict]
    expected = {"hit": 32 * hits, "evicted": 32 * (2 - hits), "cold": 32 * 4, "partial_block": 6}
    assert {cause: tokens for cause, tokens in found["total"]["tokens"].items() if tokens} == {
        cause: tokens for cause, tokens in expected.items() if tokens
    }


def test_a_policy_is_a_scenario_of_what_if(folder: Path) -> None:
    found = json_of(main, words(folder, "what-if", "--evict", "vllm,lfu"))
    rates = [row["measures"]["hit_rate"]["value"]["middle"] for row in found["points"] if "hit_rate" in row["measures"]]
    assert rates[-2:] == pytest.approx([32 * hits / TOKENS for hits in BY_HAND.values()], abs=1e-6)


def test_a_policy_is_an_axis_of_a_sweep(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(f"[axes]\nevict = {json.dumps([*BY_HAND])}")
    _, *rest = words(folder, "sweep")
    points = json_of(main, ["sweep", str(tmp_path / "grid.toml"), *rest])["points"]
    found = {one["settings"]["evict"]: one["measures"]["hit_rate"]["value"]["middle"] for one in points}
    assert found == pytest.approx({evict: 32 * hits / TOKENS for evict, hits in BY_HAND.items()}, abs=1e-6)
