"""KV bytes of a token by a model's config: known models, and configs that are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from engines.modelconfig import kv_bytes_per_token, kv_groups
from tracefile.records.errors import InputError

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA_8B, 131_072),  # 2 · 32 layers · 8 heads · 128 · 2 bytes
        (LLAMA_8B | {"head_dim": 64}, 65_536),
        (LLAMA_8B | {"num_key_value_heads": None, "torch_dtype": None, "dtype": "float32"}, 1_048_576),
        ({"text_config": LLAMA_8B, "vision_config": {}}, 131_072),
        (LLAMA_8B | {"sliding_window": 32_768, "use_sliding_window": False}, 131_072),
        (LLAMA_8B | {"sliding_window": 4_096, "layer_types": ["full_attention"] * 32}, 131_072),
        (DEEPSEEK_V3, 70_272),  # 61 · (512 + 64) · 2
    ],
)
def test_kv_bytes_per_token_of_models(tmp_path: Path, config: Any, expected: int) -> None:
    assert kv_bytes_per_token(write(tmp_path, config)) == expected
    assert kv_bytes_per_token(tmp_path / "config.json") == expected


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        (LLAMA_8B | {"layer_types": ["full_attention", "linear_attention"]}, "layer_types: linear_attention; expected"),
        (LLAMA_8B | {"sliding_window": 4_096}, "sliding_window: 4096; expected full attention in all layers"),
        (LLAMA_8B | {"num_hidden_layers": "many"}, "num_hidden_layers: 'many'; expected a positive number"),
    ],
)
def test_models_without_full_attention_are_refused(tmp_path: Path, config: Any, reported: str) -> None:
    with pytest.raises(InputError, match=reported):
        kv_bytes_per_token(write(tmp_path, config))


GEMMA_3_1B = {
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
}
GPT_OSS_20B = {
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "torch_dtype": "bfloat16",
}
QWEN3_NEXT_80B = {
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}
LLAMA_4_SCOUT = LLAMA_8B | {
    "num_hidden_layers": 48,
    "attention_chunk_size": 8192,
    "layer_types": (["chunked_attention"] * 3 + ["full_attention"]) * 12,
}
BAMBA_9B = LLAMA_8B | {
    "layers_block_type": ["attention" if index in (9, 18, 27) else "mamba" for index in range(32)],
    **{"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4},
}

NAMED = {"vocab_size": 1024, "max_position_embeddings": 8192, "intermediate_size": 2048, "torch_dtype": "bfloat16"}
GEMMA_4 = NAMED | {
    **{"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_hidden_layers": 60},
    **{"hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256},
    **{"global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True, "sliding_window": 1024},
    **{"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "hidden_size_per_layer_input": 0},
}
FALCON_H1 = NAMED | {
    **{"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "num_hidden_layers": 36},
    **{"hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128},
    **{"mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 256},
    **{"mamba_d_conv": 4, "mamba_ssm_dtype": "float32"},
}
JAMBA = NAMED | {
    **{"architectures": ["JambaForCausalLM"], "model_type": "jamba", "num_hidden_layers": 32},
    **{"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_period": 8},
    **{"attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256},
    "mamba_ssm_dtype": "float32",
}
MAMBA_1 = NAMED | {
    **{"architectures": ["MambaForCausalLM"], "model_type": "mamba", "num_hidden_layers": 48, "hidden_size": 2048},
    **{"intermediate_size": 4096, "state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": 128},
}
OF_VLLM: list[tuple[dict[str, Any], str]] = [
    (GEMMA_4, "window(1024):16*5+full:32"),
    (GEMMA_4 | {"num_global_key_value_heads": 3}, "window(1024):16*5+full:16"),  # 3/8 of the bytes: padded
    (FALCON_H1, "full:3104+mamba2:3104"),
    (JAMBA, "mamba:144*7+full:144"),
]
"""Held to vLLM's own rules in ``tests/e2e/test_hybrid_cached_tokens.py``."""


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        *OF_VLLM,
        (MAMBA_1, "mamba:16"),
        (LLAMA_8B, "full:16"),
        (DEEPSEEK_V3, "mla:16"),
        (LLAMA_8B | {"sliding_window": 4096}, "window(4096):16"),  # Mistral 7B v0.1
        (GEMMA_3_1B, "window(512):16*6+full:16"),  # 22 and 4 layers
        (GPT_OSS_20B, "window(128):16+full:16"),
        (LLAMA_4_SCOUT, "chunk(8192):16*3+full:16"),
        (QWEN3_NEXT_80B, "mamba:544*3+full:544"),  # the block that vLLM's log names
        (BAMBA_9B, "mamba2:528*10+full:528"),
    ],
)
def test_kv_cache_groups(config: Any, expected: str, tmp_path: Path) -> None:
    assert kv_groups(write(tmp_path, config)) == expected
