"""The engine's settings that decide what its scheduler does; the model's parameters decide how long it takes."""

from dataclasses import dataclass
from typing import Literal, get_args

from sim.vllm.rules import FreeRule
from tracefile.records.errors import InputError

SchedulingPolicy = Literal["fcfs", "priority"]
"""Order of the waiting requests: by arrival, or by ``priority`` (the smallest first) and then by arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Scheduler settings under vLLM's names. Raises InputError naming the setting that no engine could have."""

    num_gpu_blocks: int
    """KV-cache blocks, the null block included: usable ones are one fewer."""
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step, over all requests."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens. None: no limit but the pool's."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one request in a step while there are others; 0: no such limit."""
    enable_chunked_prefill: bool = True
    """A prompt may be computed over several steps. If not, it waits for a step with room for all of it, and no request
    may be longer than a step."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    enable_prefix_caching: bool = True
    free_rule: FreeRule = "vllm"
    async_scheduling: bool = True
    """The engine composes the next step while one runs. The scheduler obeys the order in which it is called; it is the
    engine's loop that reads this."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name}: {value} is too small; expected at least {least}")
        for name, words in (("free_rule", FreeRule), ("scheduling_policy", SchedulingPolicy)):
            if getattr(self, name) not in get_args(words):
                known = " or ".join(get_args(words))
                raise InputError(f"{name}: {getattr(self, name)!r} is unknown; expected {known}")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < (self.max_model_len or 0):
            raise InputError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is too small without chunked prefill; expected "
                f"max_model_len ({self.max_model_len}) or more"
            )

    @property
    def usable_blocks(self) -> int:
        return self.num_gpu_blocks - 1

    @property
    def longest_request(self) -> int:
        """Most prompt plus output tokens that can ever finish; the last token's KV is never computed."""
        most = self.max_model_len or self.usable_blocks * self.block_size + 1
        return most if self.enable_chunked_prefill else min(most, self.max_num_batched_tokens)


_LEAST = {
    "num_gpu_blocks": 2,
    "block_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 2,
    "long_prefill_token_threshold": 0,
}
