"""Settings of SGLang's radix cache, and their flags."""

import argparse
from dataclasses import dataclass
from typing import Any

from tracefile.records.errors import InputError
from tracefile.records.schema import MOST_TOKENS

DEFAULT_CHUNK = 8192
"""SGLang's default on GPUs of 80 GB and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RadixConfig:
    """Settings of SGLang's radix cache, under its names. Raises InputError."""

    max_total_num_tokens: int | None = None
    """Capacity of the KV cache, in tokens. None: unlimited, or from ``--num-gpu-blocks``."""
    page_size: int = 1
    """Tokens that are allocated, looked up and cached together."""
    chunked_prefill_size: int | None = DEFAULT_CHUNK
    """Most tokens of a prefill chunk, which is cached after it is computed. None: the complete prompt."""

    def __post_init__(self) -> None:
        if not 1 <= self.page_size <= MOST_TOKENS:
            raise InputError(f"--page-size: {self.page_size}; expected 1 to {MOST_TOKENS} tokens")
        chunk = self.chunked_prefill_size
        if chunk is not None and (chunk < 1 or chunk % self.page_size):
            raise InputError(
                f"--chunked-prefill-size: {chunk}; expected a multiple of the page size ({self.page_size}), or -1"
            )
        if self.max_total_num_tokens is not None and self.max_total_num_tokens < 1:
            raise InputError(f"--kv-tokens: {self.max_total_num_tokens}; expected a positive number of tokens")


def add_radix_flags(parser: argparse.ArgumentParser) -> None:
    sglang = parser.add_argument_group("SGLang", "with --engine sglang")
    sglang.add_argument(
        "--kv-tokens",
        type=int,
        help="usable tokens (max_total_num_tokens), instead of --num-gpu-blocks (default: no bound)",
    )
    sglang.add_argument(
        "--page-size", type=int, metavar="P", help="tokens in a page (default 1), a divisor or multiple of the blocks'"
    )
    sglang.add_argument(
        "--chunked-prefill-size",
        type=int,
        metavar="C",
        help=f"prefill chunk, in tokens (default {DEFAULT_CHUNK}), -1: all",
    )


def radix_config(arguments: argparse.Namespace) -> RadixConfig:
    """Return the settings of SGLang's radix cache from flags. Raises InputError."""
    settings: dict[str, Any] = {
        "max_total_num_tokens": arguments.kv_tokens,
        "page_size": arguments.page_size,
        "chunked_prefill_size": arguments.chunked_prefill_size,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    if arguments.kv_tokens is not None and arguments.num_gpu_blocks != "inf":
        raise InputError("--kv-tokens, --num-gpu-blocks: both set the cache size; expected one of them")
    if settings.get("chunked_prefill_size") == -1:
        settings["chunked_prefill_size"] = None
    return RadixConfig(**settings)
