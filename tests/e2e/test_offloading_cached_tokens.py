"""vLLM's OffloadingConnector on the real vLLM for CPU: each request's cached tokens are those of our host memory."""

import json
import os
import random
import re
from pathlib import Path

import httpx
import pytest

from scripts.vllm_engine import ModelShape, running_vllm
from sim.engine.deployment import Deployment
from sim.engine.simulation import simulate
from sim.engine.tiers import TierTraffic, traffic_of
from sim.latency.modelfile import make_model
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import plan_arrivals
from tests.sim.fleets import COSTS
from tracefile.records.schema import BlockHash, Meta, Record, RequestId

pytestmark = [pytest.mark.vllm, pytest.mark.second_vllm]
ORACLES = Path(__file__).parents[1] / "sim" / "oracles"
BLOCK = 32
GPU_BLOCKS, HOST_BLOCKS = 61, 100
CONVERSATIONS, TURNS = 8, 4


def connector(host_blocks: int) -> str:
    local = {"spec_module_path": "vllm_hostmemory", "spec_name": "HostMemorySpec", "host_blocks": host_blocks}
    return json.dumps(
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": local | {"cpu_bytes_to_use": 1 << 30},
        }
    )


def served(url: str, prompt: list[int], output: int) -> tuple[int, list[int]]:
    """Return a request's cached tokens and its output."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": output, "temperature": 0.0, "ignore_eos": True}
    reported = httpx.post(
        f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=120.0, trust_env=False
    )
    reported.raise_for_status()
    result = reported.json()
    return (result["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0), result["choices"][0]["token_ids"]


def conversations(url: str) -> list[tuple[list[int], list[int], int]]:
    """Serve conversations that share a system prompt, in turns at random; return prompts, outputs and cached tokens."""
    rng = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1000, 100_000) for _ in range(count)]

    system = tokens(100)
    message = {number: system + tokens(rng.randrange(100, 700)) for number in range(CONVERSATIONS)}
    order = [number for number in message for _ in range(TURNS)]
    rng.shuffle(order)
    seen = []
    for number in order:
        prompt, count = message[number], rng.choice([1, 3, 40])
        cached, output = served(url, prompt, count)
        seen.append((prompt, output, cached))
        message[number] = prompt + output + tokens(rng.randrange(1, 90))
    return seen


def ours(seen: list[tuple[list[int], list[int], int]]) -> tuple[list[int], TierTraffic]:
    """Return our cached tokens of the same requests, a minute apart, and the traffic of the host memory."""
    keys: dict[tuple[int, ...], int] = {}
    records = []
    for number, (prompt, output, _) in enumerate(seen):
        complete = prompt + output
        ends = range(BLOCK, len(complete), BLOCK)
        chain = [BlockHash(keys.setdefault(tuple(complete[:end]), len(keys))) for end in ends]
        full = len(prompt) // BLOCK
        records.append(
            Record(
                request_id=RequestId(f"r{number}"),
                arrival_ms=6e4 * number,
                prompt_tokens=len(prompt),
                output_tokens=len(output),
                block_hashes=chain[:full],
                output_block_hashes=chain[full:],
            )
        )
    config = EngineConfig(
        block_size=BLOCK,
        num_gpu_blocks=GPU_BLOCKS,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        max_model_len=1536,
        async_scheduling=False,
    )
    arrivals = plan_arrivals(Meta(block_size=BLOCK), records, BLOCK)
    deployed = Deployment(host_blocks=HOST_BLOCKS, kv_bytes_per_token=1)
    run = simulate(arrivals, config, make_model(COSTS, config), deployment=deployed)
    return [request.cached_tokens for request in run.requests], traffic_of([run.engine])


@pytest.mark.timeout(600)
def test_cached_tokens_equal_vllms_offloading_connector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = os.environ.get("KVTAPE_VLLM_MODEL")
    if not model:
        pytest.skip("KVTAPE_VLLM_MODEL names no model; `make test-vllm` starts vLLM")
    monkeypatch.setenv("PYTHONPATH", str(ORACLES))
    flags = ["--num-gpu-blocks-override", str(GPU_BLOCKS), "--max-model-len", "1536"]
    extra = [*flags, "--kv-transfer-config", connector(HOST_BLOCKS)]
    with running_vllm(ModelShape(), tmp_path / "vllm.log", extra=extra, pinned=False) as url:
        seen = conversations(url)
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
        again = [served(url, prompt, len(output))[1] for prompt, output, _ in seen[:6]]
    expected, traffic = ours(seen)
    assert [cached for *_, cached in seen] == expected
    assert again == [output for _, output, _ in seen[:6]]  # blocks come back as they were stored
    loaded = re.search(r"^vllm:external_prefix_cache_hits_total\S* (\S+)$", metrics, re.MULTILINE)
    assert loaded is not None
    assert float(loaded[1]) == traffic.loaded_tokens > 2_000
    assert traffic.host_evicted > 20
