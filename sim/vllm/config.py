"""Scheduler and KV cache settings of an engine, and their flags."""

import argparse
from dataclasses import dataclass
from typing import Any

from sim.vllm.kvgroups import KvLayout, parse_groups, read_groups
from tracefile.commandline.configfile import flag_of
from tracefile.records.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Scheduler and KV cache settings under vLLM's names. Raises InputError naming the invalid setting."""

    num_gpu_blocks: int
    """KV cache blocks, the null block included: one fewer is usable."""
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    """Token budget of a scheduler step, over all requests."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens. None: limited by the KV cache alone."""
    enable_prefix_caching: bool = True
    kv_groups: str | None = None
    """KV cache groups of a hybrid model (``sim.vllm.kvgroups``): ``block_size`` is then the tokens between two block
    hashes. None: a single group of full attention."""
    async_scheduling: bool = True
    """The engine composes the next step while a step runs. Only the step loop reads this setting: the scheduler follows
    the order of its calls."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name}: {value} is too small; expected at least {least}")
            if value is not None and value > MOST:
                raise InputError(f"{name}: {value} is too large; expected at most {MOST}")
        if self.layout is not None and self.layout.match_unit != self.block_size:
            raise InputError(
                f"block_size: {self.block_size}; expected {self.layout.match_unit}, the match unit of {self.kv_groups}"
            )

    @property
    def layout(self) -> KvLayout | None:
        """KV cache groups of a hybrid model; None: a single group of full attention."""
        return None if self.kv_groups is None else parse_groups(self.kv_groups)

    @property
    def usable_blocks(self) -> int:
        return self.num_gpu_blocks - 1

    @property
    def longest_request(self) -> int:
        """Longest request that can finish, prompt plus output tokens; the last token's KV is never computed."""
        sizes = [self.block_size] if self.layout is None else [group.block_size for group in self.layout.groups]
        return self.max_model_len or self.usable_blocks * max(sizes) + 1


MOST = 2**31 - 1
"""Limit of settings that count tokens, blocks or requests."""
KV_GROUPS_HELP = (
    "a hybrid model's KV cache groups and their blocks, KIND:TOKENS joined by +, such as full:16+window(1024):16*3, or "
    "its config.json; docs/capacity.md has the kinds"
)
_LEAST = {
    "num_gpu_blocks": 2,
    "block_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 2,
}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    settings = parser.add_argument_group("engine settings", "settings that differ from the recorded ones")
    add, either = settings.add_argument, argparse.BooleanOptionalAction
    add("--num-gpu-blocks", dest="num_gpu_blocks", type=int, help="KV blocks, the null block included")
    add("--block-size", type=int, metavar="TOKENS", help="tokens in a KV block")
    add("--max-num-seqs", type=int, help="most running requests")
    add("--max-num-batched-tokens", type=int, metavar="TOKENS", help="token budget of a scheduler step")
    add("--max-model-len", type=int, metavar="TOKENS", help="longest prompt plus output, in tokens")
    add_kv_groups(settings)
    add("--prefix-caching", dest="enable_prefix_caching", action=either, help="share KV blocks of equal prefixes")
    add("--async-scheduling", action=either, help="compose the next step while a step runs")
    for flag in settings._group_actions:
        flag.help = f"{flag.help}" if "default" in f"{flag.help}" else f"{flag.help} (default: the engine's)"


def add_kv_groups(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--kv-groups", metavar="GROUPS", help=KV_GROUPS_HELP)


def changed_engine_flags(arguments: argparse.Namespace) -> list[str]:
    """Return the flags of ``add_engine_flags`` on the command line."""
    names = (name for name in EngineConfig.__dataclass_fields__ if getattr(arguments, name) is not None)
    return [flag_of(name.removeprefix("enable_")) for name in names]


def engine_overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    names = EngineConfig.__dataclass_fields__
    overrides = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return {**overrides, "kv_groups": read_groups(arguments.kv_groups).name} if arguments.kv_groups else overrides
