"""KV cache groups of models by vLLM's own rules, in-process, from their configs alone.

    VENV/bin/python vllm_groups.py MODEL_DIR … > groups.json

Needs vLLM (tried with 0.32.0, CPU build) and nothing of this project. State shapes, the widened block, pages of equal
bytes and the grouping are vLLM's; the attention backend takes multiples of 16 tokens, as those of GPUs do.
"""

import json
import os
import sys
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec


class Backend(AttentionBackend):  # type: ignore[misc]
    """Block properties of a GPU backend."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return spec


def groups_of(path: str) -> list[tuple[str, int]]:
    model = ModelConfig(model=path, tokenizer=path, dtype="bfloat16", max_model_len=4096, skip_tokenizer_init=True)
    kind, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=True, mamba_ssm_cache_dtype="float32"),
        scheduler_config=SchedulerConfig(max_model_len=4096, is_encoder_decoder=False),
    )
    cache, hf, states = config.cache_config, model.hf_text_config, hasattr(kind, "get_mamba_state_shape_from_config")
    cache.block_size, cache.kv_cache_layout = 16, "LBNHC"
    if model.is_hybrid:
        Platform._align_hybrid_block_size.__func__(Platform, config, Backend)
    types = list(getattr(hf, "layers_block_type", None) or getattr(hf, "layer_types", None) or [])
    specs: dict[str, Any] = {}
    for position, name in enumerate(types or ["mamba"] * hf.num_hidden_layers):
        if name != "mamba":
            specs[f"{position}.attention"] = attention(model, config, name, position)
        if states and name in {"mamba", "hybrid"}:
            specs[f"{position}.mamba"] = MambaSpec(
                shapes=kind.get_mamba_state_shape_from_config(config),
                dtypes=kind.get_mamba_state_dtype_from_config(config),
                block_size=cache.mamba_block_size,
                page_size_padded=cache.mamba_page_size_padded,
                mamba_cache_mode="align",
            )
    groups = get_kv_cache_groups(config, specs)
    return [(type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size) for group in groups]


def attention(model: Any, config: Any, name: str, position: int) -> Any:
    hf = model.hf_text_config
    heads, dim = model.get_num_kv_heads(config.parallel_config), model.get_head_size()
    if hf.model_type.startswith("gemma4"):
        heads, dim = hf.per_layer_config[position].num_key_value_heads, hf.per_layer_config[position].head_dim
    given = {"block_size": config.cache_config.block_size, "num_kv_heads": heads, "head_size": dim}
    if name == "sliding_attention":
        return SlidingWindowSpec(**given, dtype=model.dtype, sliding_window=hf.sliding_window)
    return FullAttentionSpec(**given, dtype=model.dtype)


if __name__ == "__main__":
    print()
    print(json.dumps([groups_of(path) for path in sys.argv[1:]]))
