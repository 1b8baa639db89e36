"""KV cache layout by a model's Hugging Face ``config.json``: bytes per token for models with full attention in all
layers, and vLLM's KV cache groups for hybrid models.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tracefile.records.errors import InputError

_DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_NON_FULL_ATTENTION: Final = (
    *("layers_block_type", "hybrid_override_pattern", "attn_layer_period", "full_attention_interval"),
    *("attn_type_list", "ssm_cfg", "state_size", "num_kv_shared_layers"),
)
"""Fields of models with layers that store no KV cache, share it, or store it in another form."""


def kv_bytes_per_token(path: Path) -> int:
    """Return the KV cache bytes per token over all layers, in the dtype of the config.

    ``path``: a ``config.json`` or its folder. Raises InputError if a layer is not full attention.
    """
    path, config = _text_config(path)
    _refuse_non_full_attention(config, path)
    return _number(config, path, "num_hidden_layers") * _token_bytes(config, path, "full")


def _attention_bytes(config: Mapping[str, Any], path: Path, kind: str = "full") -> int:
    """Return the KV cache bytes per token of one attention layer."""
    heads, width = _number(config, path, "num_attention_heads"), _dtype_bytes(config, path)
    kv_heads = _number(config, path, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    dim = _number(config, path, "head_dim") if config.get("head_dim") else _number(config, path, "hidden_size") // heads
    if kind == "full" and str(config.get("model_type")).startswith("gemma4"):  # full attention has another head size
        dim = config.get("global_head_dim", 512)
        kv_heads = (config.get("attention_k_eq_v") and config.get("num_global_key_value_heads")) or kv_heads
    return 2 * kv_heads * dim * width


def kv_groups(path: Path, block_size: int = 16) -> str:
    """Return vLLM's KV cache groups of a model, in the grammar of ``--kv-groups``.

    ``path``: a ``config.json`` or its folder. Raises InputError for unknown layer kinds. All blocks have equal bytes:
    the bytes of a recurrent state if the model has any, else of the attention with the most bytes per token.
    """
    path, config = _text_config(path)
    layers = Counter(_layer_kinds(config, path))
    tokens = {kind: _token_bytes(config, path, kind) for kind in layers if not kind.startswith("mamba")}
    if tokens and len(tokens) < len(layers):
        # The attention block is enlarged until it has the bytes of a recurrent state.
        least = max(block_size, 128) if config.get("kv_lora_rank") else block_size
        block_size = least * -(-_state_bytes(config, path, layers) // (least * max(tokens.values())))
    most = max(tokens.values(), default=1)
    # If the bytes do not divide, the remaining bytes of a block are unused.
    sizes = {kind: block_size * (most // size if most % size == 0 else 1) for kind, size in tokens.items()}
    fewest, longest = min(layers.values()), max(layers.values())
    group_layers = longest if longest < 1.5 * fewest else fewest
    words = []
    for kind, count in layers.items():
        groups = -(-count // group_layers)
        words.append(f"{kind}:{sizes.get(kind, block_size)}" + (f"*{groups}" if groups > 1 else ""))
    return "+".join(words)


def _token_bytes(config: Mapping[str, Any], path: Path, kind: str) -> int:
    if config.get("kv_lora_rank"):  # MLA: one compressed vector for keys and values
        vector = _number(config, path, "kv_lora_rank") + _number(config, path, "qk_rope_head_dim")
        return vector * _dtype_bytes(config, path)
    return _attention_bytes(config, path, kind)


_KINDS: Final = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "mamba",
    "mamba": "mamba2",
}
_PURE: Final = {"mamba": "mamba", "falcon_mamba": "mamba", "mamba2": "mamba2"}
"""Models without attention, by ``model_type``."""
_PATTERN: Final = {"M": "mamba", "*": "attention"}


def _layer_kinds(config: Mapping[str, Any], path: Path) -> list[str]:
    """Return the kind of each layer with a KV cache, in the words of ``--kv-groups``."""
    count, interval = _number(config, path, "num_hidden_layers"), config.get("full_attention_interval")
    period, window = config.get("sliding_window_pattern"), config.get("sliding_window")
    named = config.get("layer_types") or config.get("layers_block_type")
    if config.get("model_type") == "falcon_h1":
        return ["full", "mamba2"] * count
    if config.get("model_type") in _PURE:
        return [_PURE[config["model_type"]]] * count
    if every := config.get("attn_layer_period"):
        at = config.get("attn_layer_offset", 0)
        return ["full" if layer % every == at else "mamba" for layer in range(count)]
    if pattern := config.get("hybrid_override_pattern"):
        named = [_PATTERN[letter] for letter in pattern if letter in _PATTERN]
    elif not named and interval:
        named = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(count)]
    elif not named and window and isinstance(period, int):
        named = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(count)]
    elif not named:
        first = config.get("max_window_layers", 0) if config.get("use_sliding_window", window) else count
        named = ["full_attention"] * min(first, count) + ["sliding_attention"] * max(count - first, 0)
        named = named if window else ["full_attention"] * count
    if not isinstance(named, list) or not set(named) <= _KINDS.keys():
        raise InputError(f"{path}: layers: {sorted(set(map(str, named)))}; expected {', '.join(sorted(_KINDS))}")
    spans = {"window": "sliding_window", "chunk": "attention_chunk_size"}
    kinds = [_KINDS[name] for name in named[: len(named) - (config.get("num_kv_shared_layers") or 0)]]
    words = {kind: f"{kind}({_number(config, path, spans[kind])})" for kind in spans if kind in kinds}
    words |= {"full": "mla"} if config.get("kv_lora_rank") else {}
    return [words.get(kind, kind) for kind in kinds]


def _state_bytes(config: Mapping[str, Any], path: Path, layers: Mapping[str, int]) -> int:
    """Return the bytes of a layer's recurrent state: last inputs of the convolution, and the matrix of each head."""
    width = _dtype_bytes(config, path)
    is_float32 = config.get("mamba_ssm_dtype") == "float32" or "hybrid_override_pattern" in config
    wide = 4 if is_float32 else width

    def field(*names: str) -> int:
        return _number(config, path, next((name for name in names if name in config), names[0]))

    if "mamba" in layers and "linear_key_head_dim" not in config:  # Mamba-1
        inputs, heads, dim = field("mamba_expand", "expand") * field("hidden_size"), 1, 1
        state, kernel = inputs * field("mamba_d_state", "state_size"), field("mamba_d_conv", "conv_kernel")
    elif "mamba" in layers:
        keys = field("linear_num_key_heads") * field("linear_key_head_dim")
        heads, dim = field("linear_num_value_heads"), field("linear_value_head_dim")
        inputs, state = 2 * keys + heads * dim, field("linear_key_head_dim")
        kernel = field("linear_conv_kernel_dim")
    else:
        heads, dim = field("mamba_n_heads", "mamba_num_heads"), field("mamba_d_head", "mamba_head_dim")
        state, kernel = field("mamba_d_state", "ssm_state_size"), field("mamba_d_conv", "conv_kernel")
        inputs = heads * dim + 2 * field("mamba_n_groups", "n_groups") * state
    return (kernel - 1) * inputs * width + heads * dim * state * wide


def _text_config(path: Path) -> tuple[Path, Mapping[str, Any]]:
    path = path / "config.json" if path.is_dir() else path
    config = _read(path)
    return path, config["text_config"] if isinstance(config.get("text_config"), dict) else config


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected a model's config.json or its folder") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {error}; expected a model's config.json") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: a JSON {type(config).__name__}; expected a model's config.json, an object")
    return config


def _refuse_non_full_attention(config: Mapping[str, Any], path: Path) -> None:
    kinds = config.get("layer_types") or []
    value = next((kind for kind in kinds if kind != "full_attention"), None) if isinstance(kinds, list) else kinds
    name: str | None = "layer_types" if value is not None else None
    if name is None and config.get("sliding_window") and config.get("use_sliding_window", not kinds):
        name, value = "sliding_window", config["sliding_window"]
    if name is None and (name := next((key for key in _NON_FULL_ATTENTION if config.get(key)), None)) is not None:
        value = config[name]
    if name is not None:
        text = str(value)
        raise InputError(
            f"{path}: {name}: {text if len(text) <= 60 else text[:59] + '…'}; expected full attention in all layers: "
            "give --kv-bytes-per-token"
        )


def _number(config: Mapping[str, Any], path: Path, name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{path}: {name}: {value!r}; expected a positive number, or --kv-bytes-per-token")
    return value


def _dtype_bytes(config: Mapping[str, Any], path: Path) -> int:
    dtype = config.get("torch_dtype") or config.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise InputError(f"{path}: torch_dtype: {dtype!r}; expected {', '.join(_DTYPE_BYTES)}, or --kv-bytes-per-token")
    return _DTYPE_BYTES[dtype]
