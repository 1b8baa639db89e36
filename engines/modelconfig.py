"""Facts of the KV cache by a model's Hugging Face ``config.json``: bytes of a token, for models with full attention in
all layers, and vLLM's cache groups, for hybrid ones.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tracefile.records.errors import InputError

_DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_OTHER_LAYERS: Final = (
    *("layers_block_type", "hybrid_override_pattern", "attn_layer_period", "full_attention_interval"),
    *("attn_type_list", "ssm_cfg", "state_size", "num_kv_shared_layers"),
)
"""Fields of models whose layers keep no KV, share it, or keep it in another form."""


def kv_bytes_per_token(path: Path) -> int:
    """Return the bytes of one token's keys and values in all layers, in the config's own dtype.

    ``path``: a ``config.json``, or the folder of one. Raises InputError if other layers than full attention are in it.
    """
    path, config = _text_config(path)
    _refuse_other_layers(config, path)
    return _number(config, path, "num_hidden_layers") * _token_bytes(config, path, "full")


def _attention_bytes(config: Mapping[str, Any], path: Path, kind: str = "full") -> int:
    """Bytes of a token's keys and values in one layer of attention."""
    heads, width = _number(config, path, "num_attention_heads"), _dtype_bytes(config, path)
    kv_heads = _number(config, path, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    dim = _number(config, path, "head_dim") if config.get("head_dim") else _number(config, path, "hidden_size") // heads
    if kind == "full" and str(config.get("model_type")).startswith("gemma4"):  # layers of full attention have their own
        dim = config.get("global_head_dim", 512)
        kv_heads = (config.get("attention_k_eq_v") and config.get("num_global_key_value_heads")) or kv_heads
    return 2 * kv_heads * dim * width


def kv_groups(path: Path, block_size: int = 16) -> str:
    """Return vLLM's KV cache groups of a model, in the grammar of ``--kv-groups``.

    ``path``: a ``config.json``, or the folder of one. Raises InputError for layers of unknown kinds. All
    blocks have as many bytes: those of a state where there are any, else of the attention with the most bytes a token.
    """
    path, config = _text_config(path)
    layers = Counter(_layer_kinds(config, path))
    tokens = {kind: _token_bytes(config, path, kind) for kind in layers if not kind.startswith("mamba")}
    if tokens and len(tokens) < len(layers):
        # The block of attention is widened until it has the bytes of a state.
        least = max(block_size, 128) if config.get("kv_lora_rank") else block_size
        block_size = least * -(-_state_bytes(config, path, layers) // (least * max(tokens.values())))
    most = max(tokens.values(), default=1)
    # Where a whole number of blocks does not fit, the rest of the bytes stays unused.
    sizes = {kind: block_size * (most // one if most % one == 0 else 1) for kind, one in tokens.items()}
    fewest, longest = min(layers.values()), max(layers.values())
    together = longest if longest < 1.5 * fewest else fewest
    words = []
    for kind, count in layers.items():
        groups = -(-count // together)
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
    """Kind of every layer with a cache, as ``--kv-groups`` has it."""
    count, interval = _number(config, path, "num_hidden_layers"), config.get("full_attention_interval")
    period, window = config.get("sliding_window_pattern"), config.get("sliding_window")
    named = config.get("layer_types") or config.get("layers_block_type")
    if config.get("model_type") == "falcon_h1":
        return ["full", "mamba2"] * count
    if config.get("model_type") in _PURE:
        return [_PURE[config["model_type"]]] * count
    if every := config.get("attn_layer_period"):
        at = config.get("attn_layer_offset", 0)
        return ["full" if place % every == at else "mamba" for place in range(count)]
    if pattern := config.get("hybrid_override_pattern"):
        named = [_PATTERN[letter] for letter in pattern if letter in _PATTERN]
    elif not named and interval:
        named = ["linear_attention" if (place + 1) % interval else "full_attention" for place in range(count)]
    elif not named and window and isinstance(period, int):
        named = ["sliding_attention" if (place + 1) % period else "full_attention" for place in range(count)]
    elif not named:
        first = config.get("max_window_layers", 0) if config.get("use_sliding_window", window) else count
        named = ["full_attention"] * min(first, count) + ["sliding_attention"] * max(count - first, 0)
        named = named if window else ["full_attention"] * count
    if not isinstance(named, list) or not set(named) <= _KINDS.keys():
        raise InputError(f"{path}: layers: {sorted(set(map(str, named)))}; expected {', '.join(sorted(_KINDS))}")
    spans = {"window": "sliding_window", "chunk": "attention_chunk_size"}
    kinds = [_KINDS[name] for name in named[: len(named) - (config.get("num_kv_shared_layers") or 0)]]
    told = {kind: f"{kind}({_number(config, path, spans[kind])})" for kind in spans if kind in kinds}
    told |= {"full": "mla"} if config.get("kv_lora_rank") else {}
    return [told.get(kind, kind) for kind in kinds]


def _state_bytes(config: Mapping[str, Any], path: Path, layers: Mapping[str, int]) -> int:
    """Bytes of one layer's recurrent state: the last inputs of its convolution, and the matrix of each head."""
    width = _dtype_bytes(config, path)
    is_float32 = config.get("mamba_ssm_dtype") == "float32" or "hybrid_override_pattern" in config
    wide = 4 if is_float32 else width

    def told(*names: str) -> int:
        return _number(config, path, next((name for name in names if name in config), names[0]))

    if "mamba" in layers and "linear_key_head_dim" not in config:  # Mamba-1
        inputs, heads, dim = told("mamba_expand", "expand") * told("hidden_size"), 1, 1
        state, kernel = inputs * told("mamba_d_state", "state_size"), told("mamba_d_conv", "conv_kernel")
    elif "mamba" in layers:
        keys = told("linear_num_key_heads") * told("linear_key_head_dim")
        heads, dim = told("linear_num_value_heads"), told("linear_value_head_dim")
        inputs, state = 2 * keys + heads * dim, told("linear_key_head_dim")
        kernel = told("linear_conv_kernel_dim")
    else:
        heads, dim = told("mamba_n_heads", "mamba_num_heads"), told("mamba_d_head", "mamba_head_dim")
        state, kernel = told("mamba_d_state", "ssm_state_size"), told("mamba_d_conv", "conv_kernel")
        inputs = heads * dim + 2 * told("mamba_n_groups", "n_groups") * state
    return (kernel - 1) * inputs * width + heads * dim * state * wide


def _text_config(path: Path) -> tuple[Path, Mapping[str, Any]]:
    path = path / "config.json" if path.is_dir() else path
    config = _read(path)
    return path, config["text_config"] if isinstance(config.get("text_config"), dict) else config


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; expected a model's config.json or its folder") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {error}; expected a model's config.json") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: a JSON {type(found).__name__}; expected a model's config.json, an object")
    return found


def _refuse_other_layers(config: Mapping[str, Any], path: Path) -> None:
    kinds = config.get("layer_types") or []
    other = next((kind for kind in kinds if kind != "full_attention"), None) if isinstance(kinds, list) else kinds
    name: str | None = "layer_types" if other is not None else None
    if name is None and config.get("sliding_window") and config.get("use_sliding_window", not kinds):
        name, other = "sliding_window", config["sliding_window"]
    if name is None and (name := next((field for field in _OTHER_LAYERS if config.get(field)), None)) is not None:
        other = config[name]
    if name is not None:
        text = str(other)
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
