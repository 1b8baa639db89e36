"""From block hashes to a request's bytes: how many tokens a second, on one core, in this process."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from loadgen.core.bodies import encode_ids, prepare_tables
from loadgen.core.vocabulary import ORDINARY
from replay.expansion import Expansion
from tracefile import BlockHash, RequestId
from tracefile.hashing.splitmix64 import mix64

ROUNDS = 7
SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt to expand: a number of blocks of a number of tokens."""

    blocks: int
    block_size: int

    @property
    def tokens(self) -> int:
        """All of it."""
        return self.blocks * self.block_size


PROMPTS = (Prompt(16, 16), Prompt(625, 16), Prompt(20, 512), Prompt(250, 512))
"""A short prompt, 10,000 tokens in small and in large blocks, a long context."""


@dataclass(frozen=True, slots=True)
class Expanded:
    """Figures of a prompt: the fastest round, in CPU time."""

    prompt: Prompt
    tokens_per_s: float
    us_per_request: float

    def __str__(self) -> str:
        size = f"{self.prompt.tokens:,} tokens in blocks of {self.prompt.block_size}"
        return f"{size:<34}{self.tokens_per_s / 1e6:>8.1f} M tokens/s{self.us_per_request:>10,.0f} µs"


def expansion() -> list[Expanded]:
    """Expand all prompts, from hashes to JSON bytes."""
    prepare_tables()
    return [_expanded(prompt) for prompt in PROMPTS]


def _expanded(prompt: Prompt) -> Expanded:
    expander = Expansion(prompt.block_size, "bench", ORDINARY)
    hashes = [BlockHash(mix64(number)) for number in range(prompt.blocks)]

    def work() -> bytes:
        return encode_ids(expander.blocks(hashes, RequestId("bench")).ravel())

    seconds = min(_cpu_seconds(work) for _ in range(ROUNDS))
    return Expanded(prompt, prompt.tokens / seconds, seconds * 1e6)


def _cpu_seconds(work: Callable[[], bytes]) -> float:
    """CPU time of one call, over as many as take a tenth of a second."""
    calls, began = 0, time.process_time()
    while (spent := time.process_time() - began) < SECONDS:
        work()
        calls += 1
    return spent / calls
