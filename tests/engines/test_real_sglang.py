"""Evictions of a served SGLang: cached tokens of every request against ours."""

import random
from pathlib import Path

import httpx
import pytest

from scripts import sglang_engine
from scripts.vllm_engine import ModelShape
from sim.sglang.config import RadixConfig
from sim.sglang.radix import RadixPool

pytestmark = [pytest.mark.engines, pytest.mark.timeout(580)]

REQUESTS = 60


def prompts(seed: int) -> list[list[int]]:
    """Walks down a small tree of runs of tokens, cut anywhere."""
    rng = random.Random(seed)
    samples = []
    for _ in range(REQUESTS):
        node, tokens = 0, list[int]()
        for _ in range(rng.randrange(1, 7)):
            node = node * 3 + rng.choice([1, 1, 2, 3])
            tokens += [10 + (37 * node + 11 * index) % 900 for index in range(48)]
        samples.append(tokens[: rng.randrange(20, len(tokens) + 1)])
    return samples


def test_cached_tokens_equal_a_served_sglang(tmp_path: Path) -> None:
    if not sglang_engine.HOME.is_installed():
        pytest.skip("python -m scripts.sglang_engine install")
    rng, keys = random.Random(7), dict[tuple[int, ...], int]()
    pool = RadixPool(RadixConfig(max_total_num_tokens=700, chunked_prefill_size=64), 1)
    flags = ["--max-total-tokens", "700", "--chunked-prefill-size", "64"]
    flags += ["--context-length", "512", "--max-running-requests", "4"]
    with (
        sglang_engine.running_sglang(ModelShape(), tmp_path / "log", extra=flags) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=120.0) as client,
    ):
        reported, ours = [], []
        for prompt in prompts(3):
            output_tokens = rng.randrange(1, 9)
            sampling = {"max_new_tokens": output_tokens, "ignore_eos": True, "temperature": 0.0}
            body = {"input_ids": prompt, "sampling_params": sampling}
            response = client.post("/generate", json=body).raise_for_status().json()
            reported.append(response["meta_info"]["cached_tokens"])
            computed = [*prompt, *response["output_ids"][:-1]]
            chain = [keys.setdefault(tuple(computed[: end + 1]), len(keys)) for end in range(len(computed))]
            ours.append(pool.run(chain, len(prompt), len(computed)))
    assert pool.tree.evicted_nodes > REQUESTS
    assert ours == reported
