"""Hybrid models of random weights on the real vLLM for CPU: each request's cached tokens and the groups are ours."""

import json
import os
import random
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from engines.modelconfig import kv_groups
from scripts.vllm_engine import HOME, ModelShape, running_vllm
from sim.vllm.config import EngineConfig
from sim.vllm.kvgroups import parse_groups
from tests.engines.test_modelconfig import OF_VLLM
from tests.sim.oracles.readable.hybrid import HybridScheduler
from tests.sim.oracles.readable.request import Request

pytestmark = [pytest.mark.vllm, pytest.mark.second_vllm]
SCRIPT = Path(__file__).parents[1] / "sim" / "oracles" / "vllm_engine.py"
SMALL = {
    **{"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"},
    **{"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
}
GEMMA_3 = SMALL | {
    **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 6},
    **{"sliding_window": 256, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    **{"query_pre_attn_scalar": 64, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
}
QWEN3_NEXT = SMALL | {
    **{"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4},
    **{"full_attention_interval": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64},
    **{"linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
    **{"mlp_only_layers": [], "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "mamba_ssm_dtype": "float32",
}
ENGINE = {
    **{"max_model_len": 4096, "block_size": 32, "max_num_batched_tokens": 512, "max_num_seqs": 8},
    **{"num_gpu_blocks_override": 300, "enable_prefix_caching": True},
    "mamba_ssm_cache_dtype": "float32",  # vLLM's own choice depends on the processor
}


def batches(rng: random.Random) -> list[list[dict[str, Any]]]:
    """A system prompt cut at several lengths, and prompts that continue others."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, 1000) for _ in range(count)]

    system = tokens(700)
    made: list[list[dict[str, Any]]] = []
    earlier: list[list[int]] = []
    for _ in range(14):
        batch: list[dict[str, Any]] = []
        for _ in range(rng.choice([1, 1, 2, 4])):
            longer = (
                rng.choice(earlier) if earlier and rng.random() < 0.5 else system[: rng.choice([100, 240, 500, 700])]
            )
            batch.append(
                {"prompt": (longer + tokens(rng.choice([1, 17, 90, 300])))[:3000], "output": rng.randrange(1, 70)}
            )
        made.append(batch)
        earlier += [item["prompt"] for item in batch]
    return made


@pytest.mark.parametrize(
    ("model", "groups"),
    [(GEMMA_3, "window(256):32*5+full:32"), (QWEN3_NEXT, "mamba:288*3+full:288")],
    ids=["sliding window", "recurrent states"],
)
def test_cached_tokens_equal_vllms(model: dict[str, Any], groups: str, tmp_path: Path) -> None:
    python = os.environ.get("KVTAPE_VLLM_PYTHON")
    if not python:
        pytest.skip("KVTAPE_VLLM_PYTHON does not name a vLLM")
    (tmp_path / "config.json").write_text(json.dumps(model))
    assert kv_groups(tmp_path, 32) == groups
    plan: dict[str, Any] = {"engine": ENGINE, "batches": batches(random.Random(3))}
    command = [python, str(SCRIPT), str(tmp_path)]
    reported = subprocess.run(command, input=json.dumps(plan), capture_output=True, text=True, timeout=170, check=False)
    assert reported.returncode == 0, reported.stderr[-2000:]
    theirs = json.loads(reported.stdout.splitlines()[-1])
    assert theirs["blocks"] == [group.block_size for group in parse_groups(groups).groups]
    cached = cached_here(groups, plan["batches"], theirs["found"])
    assert cached == [answer["cached"] for answers in theirs["found"] for answer in answers]
    assert sum(cached) > 5_000


def cached_here(groups: str, batches: list[list[dict[str, Any]]], result: list[list[dict[str, Any]]]) -> list[int]:
    """Cached tokens of each request on our scheduler, by the outputs found."""
    unit = parse_groups(groups).match_unit
    scheduler = HybridScheduler(
        EngineConfig(
            num_gpu_blocks=300,
            block_size=unit,
            kv_groups=groups,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            max_model_len=4096,
            async_scheduling=False,
        )
    )
    keys: dict[tuple[int, ...], int] = {}
    cached: list[int] = []
    for batch, answers in zip(batches, result, strict=True):
        requests = []
        for item, answer in zip(batch, answers, strict=True):
            tokens = item["prompt"] + answer["output"]
            chain = [keys.setdefault(tuple(tokens[:end]), len(keys)) for end in range(unit, len(tokens), unit)]
            requests.append(Request(str(len(keys)), len(item["prompt"]), item["output"], chain))
        for request in requests:
            scheduler.add(request)
        while scheduler.has_work:
            scheduler.finish_step(scheduler.schedule())
        cached += [request.cached_tokens or 0 for request in requests]
    return cached


@pytest.mark.timeout(600)
def test_cached_tokens_over_http_equal_vllms(tmp_path: Path) -> None:
    """A sliding-window model, served: what each response says of its prompt's cached tokens."""
    shape = ModelShape()
    if not HOME.is_installed() or not shape.directory.exists():
        pytest.skip("no vLLM is installed: python -m scripts.vllm_engine install")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(shape.directory / name, tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3))
    settings = {"max-model-len": 4096, "max-num-seqs": 8, "max-num-batched-tokens": 512, "num-gpu-blocks-override": 300}
    extra = [
        "--model",
        str(tmp_path),
        *(word for name, value in settings.items() for word in (f"--{name}", str(value))),
    ]
    asked = [[item] for batch in batches(random.Random(5)) for item in batch]
    with running_vllm(shape, tmp_path / "vllm.log", extra=extra, pinned=False) as url:
        result = [[complete(url, item)] for (item,) in asked]
    cached = cached_here("window(256):32*5+full:32", asked, result)
    assert cached == [answer["cached"] for (answer,) in result]
    assert sum(cached) > 3_000


def complete(url: str, item: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": item["prompt"], "max_tokens": item["output"], "ignore_eos": True}
    content = json.dumps({**body, "temperature": 0, "return_token_ids": True}).encode()
    asked = urllib.request.Request(f"{url}/v1/completions", content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as response:
        reported = json.load(response)
    details = reported["usage"]["prompt_tokens_details"] or {}
    return {"cached": details.get("cached_tokens") or 0, "output": reported["choices"][0]["token_ids"]}


def test_kv_cache_groups_equal_vllms(tmp_path: Path) -> None:
    python = os.environ.get("KVTAPE_VLLM_PYTHON")
    if not python:
        pytest.skip("KVTAPE_VLLM_PYTHON does not name a vLLM")
    folders = [tmp_path / str(number) for number in range(len(OF_VLLM))]
    for folder, (config, _) in zip(folders, OF_VLLM, strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    command = [python, str(SCRIPT.with_name("vllm_groups.py")), *map(str, folders)]
    reported = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert reported.returncode == 0, reported.stderr[-2000:]
    kinds = {"full": "FullAttentionSpec", "window": "SlidingWindowSpec", "mamba": "MambaSpec", "mamba2": "MambaSpec"}
    ours = [[[kinds[item.kind], item.block_size] for item in parse_groups(groups).groups] for _, groups in OF_VLLM]
    assert ours == json.loads(reported.stdout.splitlines()[-1])
