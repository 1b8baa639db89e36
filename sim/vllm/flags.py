"""Engine settings on the command line: flags that overrule those of a model or a trace."""

import argparse
from typing import Any, get_args

from sim.vllm.config import EngineConfig, SchedulingPolicy
from sim.vllm.rules import FREE_RULES, FreeRule


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    settings = parser.add_argument_group("engine settings", "where they differ from the known ones")
    add, either = settings.add_argument, argparse.BooleanOptionalAction
    add("--num-gpu-blocks", dest="num_gpu_blocks", type=int, metavar="N", help="KV blocks, the null block included")
    add("--block-size", type=int, metavar="TOKENS", help="tokens in a block")
    add("--max-num-seqs", type=int, metavar="N", help="requests running at once")
    add("--max-num-batched-tokens", type=int, metavar="TOKENS", help="tokens in a step")
    add("--max-model-len", type=int, metavar="TOKENS", help="longest prompt plus output")
    add(
        "--long-prefill-token-threshold",
        type=int,
        metavar="TOKENS",
        help="most tokens of one request in a step while there are others; 0: no such limit",
    )
    add(
        "--chunked-prefill",
        dest="enable_chunked_prefill",
        action=either,
        help="compute a prompt over several steps; if not, it waits for a step with room for all of it",
    )
    add("--scheduling-policy", choices=get_args(SchedulingPolicy), help="order in which waiting requests are served")
    add("--prefix-caching", dest="enable_prefix_caching", action=either, help="share prefixes")
    add("--async-scheduling", action=either, help="compose a step while the one before it runs")
    add_free_rule(settings)


def add_free_rule(parser: argparse._ActionsContainer, default: FreeRule | None = None) -> None:
    told = "" if default is None else f" (default {default})"
    parser.add_argument(
        "--free-rule",
        choices=FREE_RULES,
        default=default,
        help="where freed blocks without a hash go: the free queue's head (vllm) or its tail (append_all, older "
        f"vLLM){told}",
    )


def engine_overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    names = EngineConfig.__dataclass_fields__
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}
