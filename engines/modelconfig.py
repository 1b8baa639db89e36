"""Size of a token's KV by a model's Hugging Face ``config.json``, for models with full attention in all layers."""

import json
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
    path = path / "config.json" if path.is_dir() else path
    config = _read(path)
    config = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    _refuse_other_layers(config, path)
    layers, width = _number(config, path, "num_hidden_layers"), _dtype_bytes(config, path)
    if config.get("kv_lora_rank"):  # MLA: one compressed vector for keys and values
        return layers * width * (_number(config, path, "kv_lora_rank") + _number(config, path, "qk_rope_head_dim"))
    heads = _number(config, path, "num_attention_heads")
    kv_heads = _number(config, path, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    dim = _number(config, path, "head_dim") if config.get("head_dim") else _number(config, path, "hidden_size") // heads
    return 2 * layers * kv_heads * dim * width


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
