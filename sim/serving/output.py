"""Random outputs, fixed by prompt, seed and choice, drawn whole on arrival: so the hashes of their blocks are known."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

import numpy as np
import xxhash

from sim.serving.vocabulary import Vocabulary
from sim.vllm.request import Request
from tracefile.hashing.splitmix64 import GOLDEN, MASK64, mix64_array
from tracefile.records.arrays import UInt64Array

FinishReason = Literal["stop", "length"]
LENGTH_SPREAD = 0.8
"""Standard deviation of a free output's log length."""
_LENGTH, _FIRST_TOKEN = 0, 16
_NORMAL = NormalDist()  # SciPy's takes a third of the server's start


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLimits:
    """Limits of an output's length, in tokens."""

    max_tokens: int
    min_tokens: int = 0
    """No end before that many."""
    ignore_eos: bool = False
    """No end before ``max_tokens``."""
    median_tokens: float = 200.0
    """Median length of an output that ends when it likes (log-normal)."""


@dataclass(frozen=True, slots=True)
class Output:
    """The whole output to one prompt."""

    token_ids: list[int]
    """The end token included, if it came to that."""
    finish_reason: FinishReason


def draw_output(prompt: bytes, vocabulary: Vocabulary, limits: OutputLimits, seed: int, choice: int) -> Output:
    """Return the output for ``prompt`` (ids as little-endian u32)."""
    stream = np.uint64(xxhash.xxh3_64_intdigest(prompt, seed=(seed * GOLDEN + choice) & MASK64))
    natural = limits.max_tokens if limits.ignore_eos else _natural_length(stream, limits)
    ends = not limits.ignore_eos and natural <= limits.max_tokens
    length = min(natural, limits.max_tokens)
    places = random_u64(stream, _FIRST_TOKEN, length) % np.uint64(len(vocabulary.output_ids))
    token_ids: list[int] = vocabulary.output_ids[places].tolist()
    if ends:
        token_ids[-1] = vocabulary.end_id
    return Output(token_ids, "stop" if ends else "length")


def _natural_length(stream: np.uint64, limits: OutputLimits) -> int:
    uniform = (int(random_u64(stream, _LENGTH, 1)[0] >> np.uint64(12)) + 0.5) * 2.0**-52
    length = round(limits.median_tokens * math.exp(LENGTH_SPREAD * _NORMAL.inv_cdf(uniform)))
    return max(length, limits.min_tokens + 1, 2)


def random_u64(stream: np.uint64, first: int, count: int) -> UInt64Array:
    """Numbers ``first`` and on of a stream: splitmix64 of the counter; shape (count,)."""
    return mix64_array(stream + np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(GOLDEN))


Outcome = Literal["finished", "aborted"]


@dataclass(slots=True, eq=False)
class Generation:
    """An output of a real-time engine; made by the service, advanced by the engine."""

    request: Request
    output: Output
    on_progress: Callable[["Generation"], None]
    """Called after ``delivered`` grew or ``outcome`` was set, on the event loop."""
    index: int = 0
    """Index of the choice in its response."""
    routed: int = -1
    """Number of its request by the fleet's router; -1: there is one engine."""
    delivered: int = 0
    """Tokens of the output that exist by now."""
    outcome: Outcome | None = None
    """None: not ended."""
    arrival_ms: float = 0.0
    entered: bool = False
    token_ms: list[float] = field(default_factory=list)
    """When the first and the latest token appeared, on the engine's clock."""
