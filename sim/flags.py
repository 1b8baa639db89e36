"""Engine settings on the command line: flags that overrule those of a model or a trace."""

import argparse
from typing import Any, get_args

from sim.config import FreeRule, SchedulingPolicy


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags under vLLM's names; one that is not given leaves the setting as it is."""
    settings = parser.add_argument_group("engine settings", "where they differ from the known ones")
    settings.add_argument("--kv-blocks", dest="num_gpu_blocks", type=int, help="KV blocks, the null block included")
    settings.add_argument("--block-size", type=int, help="tokens per block")
    settings.add_argument("--max-num-seqs", type=int, help="requests running at once")
    settings.add_argument("--max-num-batched-tokens", type=int, help="tokens per step")
    settings.add_argument("--max-model-len", type=int, help="longest prompt plus output")
    settings.add_argument("--long-prefill-token-threshold", type=int, help="most tokens of one request in a step")
    settings.add_argument("--chunked-prefill", dest="enable_chunked_prefill", action=argparse.BooleanOptionalAction)
    settings.add_argument("--scheduling-policy", choices=get_args(SchedulingPolicy), help="who is served next")
    settings.add_argument("--prefix-caching", dest="enable_prefix_caching", action=argparse.BooleanOptionalAction)
    settings.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction)
    settings.add_argument("--free-rule", choices=get_args(FreeRule), help="where a freed block goes")


def engine_overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given."""
    names = (
        "num_gpu_blocks",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "long_prefill_token_threshold",
        "enable_chunked_prefill",
        "scheduling_policy",
        "enable_prefix_caching",
        "async_scheduling",
        "free_rule",
    )
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}
