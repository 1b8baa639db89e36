"""Random outputs, determined by prompt, seed and choice; drawn on arrival, so that block hashes are known."""

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
    """Limits of an output, in tokens."""

    max_tokens: int
    min_tokens: int = 0
    """Fewest tokens before a stop."""
    ignore_eos: bool = False
    """No stop before ``max_tokens``."""
    median_tokens: float = 200.0
    """Median length of an output that stops by itself (log-normal)."""


@dataclass(frozen=True, slots=True)
class Output:
    """Complete output of a prompt."""

    token_ids: list[int]
    """With the stop token, if any."""
    finish_reason: FinishReason


def draw_output(prompt: bytes, vocabulary: Vocabulary, limits: OutputLimits, seed: int, choice: int) -> Output:
    """Return the output tokens for ``prompt`` (ids as little-endian u32)."""
    stream = np.uint64(xxhash.xxh3_64_intdigest(prompt, seed=(seed * GOLDEN + choice) & MASK64))
    natural = limits.max_tokens if limits.ignore_eos else _natural_length(stream, limits)
    ends = not limits.ignore_eos and natural <= limits.max_tokens
    length = min(natural, limits.max_tokens)
    indexes = random_u64(stream, _FIRST_TOKEN, length) % np.uint64(len(vocabulary.output_ids))
    token_ids: list[int] = vocabulary.output_ids[indexes].tolist()
    if ends:
        token_ids[-1] = vocabulary.end_id
    return Output(token_ids, "stop" if ends else "length")


def _natural_length(stream: np.uint64, limits: OutputLimits) -> int:
    uniform = (int(random_u64(stream, _LENGTH, 1)[0] >> np.uint64(12)) + 0.5) * 2.0**-52
    length = round(limits.median_tokens * math.exp(LENGTH_SPREAD * _NORMAL.inv_cdf(uniform)))
    return max(length, limits.min_tokens + 1, 2)


def random_u64(stream: np.uint64, first: int, count: int) -> UInt64Array:
    """Return ``count`` numbers of a stream from ``first``: splitmix64 of the counter; shape (count,)."""
    return mix64_array(stream + np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(GOLDEN))


Outcome = Literal["finished", "aborted"]


@dataclass(slots=True, eq=False)
class Generation:
    """Output of a request in a real-time engine; created by the service, advanced by scheduler steps."""

    request: Request
    output: Output
    on_progress: Callable[["Generation"], None]
    """Called after ``delivered`` grew or ``outcome`` was set, on the event loop."""
    index: int = 0
    """Index of the choice in its response."""
    routed: int = -1
    """Request number at the router; -1: one engine."""
    delivered: int = 0
    """Tokens generated so far."""
    outcome: Outcome | None = None
    """None: running or waiting."""
    arrival_ms: float = 0.0
    entered: bool = False
    token_ms: list[float] = field(default_factory=list)
    """Times of the first and the latest token, on the engine's clock."""
