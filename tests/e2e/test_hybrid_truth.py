"""Hybrid models of random weights on the real vLLM for CPU: each request's cached tokens and the groups are ours."""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engines.modelconfig import kv_groups
from sim.vllm.config import EngineConfig
from sim.vllm.hybridscheduler import HybridScheduler
from sim.vllm.kvgroups import parse_groups
from sim.vllm.request import Request

pytestmark = pytest.mark.vllm
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
    "mamba_ssm_dtype": "float32",  # as vLLM's CPU backend takes it
}
ENGINE = {
    **{"max_model_len": 4096, "block_size": 32, "max_num_batched_tokens": 512, "max_num_seqs": 8},
    **{"num_gpu_blocks_override": 300, "enable_prefix_caching": True},
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
        earlier += [one["prompt"] for one in batch]
    return made


@pytest.mark.parametrize(
    ("model", "groups"),
    [(GEMMA_3, "window(256):32*5+full:32"), (QWEN3_NEXT, "mamba:288*3+full:288")],
    ids=["sliding window", "recurrent states"],
)
def test_cached_tokens_are_vllms(model: dict[str, Any], groups: str, tmp_path: Path) -> None:
    python = os.environ.get("KVTAPE_VLLM_PYTHON")
    if not python:
        pytest.skip("KVTAPE_VLLM_PYTHON does not name a vLLM")
    (tmp_path / "config.json").write_text(json.dumps(model))
    assert kv_groups(tmp_path, 32) == groups
    plan: dict[str, Any] = {"engine": ENGINE, "batches": batches(random.Random(3))}
    command = [python, str(SCRIPT), str(tmp_path)]
    told = subprocess.run(command, input=json.dumps(plan), capture_output=True, text=True, timeout=170, check=False)
    assert told.returncode == 0, told.stderr[-2000:]
    theirs = json.loads(told.stdout.splitlines()[-1])
    layout = parse_groups(groups)
    assert theirs["blocks"] == [group.block_size for group in layout.groups]
    scheduler = HybridScheduler(
        EngineConfig(
            num_gpu_blocks=300,
            block_size=layout.match_unit,
            kv_groups=groups,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            max_model_len=4096,
            async_scheduling=False,
        )
    )
    keys: dict[tuple[int, ...], int] = {}
    cached: list[int | None] = []
    for batch, answers in zip(plan["batches"], theirs["found"], strict=True):
        requests = []
        for one, answer in zip(batch, answers, strict=True):
            tokens, unit = one["prompt"] + answer["output"], layout.match_unit
            ends = range(unit, len(tokens), unit)
            chain = [keys.setdefault(tuple(tokens[:end]), len(keys)) for end in ends]
            requests.append(Request(str(len(cached)), len(one["prompt"]), one["output"], chain))
        for request in requests:
            scheduler.add(request)
        while scheduler.has_work:
            scheduler.finish_step(scheduler.schedule())
        cached += [request.cached_tokens for request in requests]
    assert cached == [answer["cached"] for answers in theirs["found"] for answer in answers]
    assert sum(one or 0 for one in cached) > 5_000
