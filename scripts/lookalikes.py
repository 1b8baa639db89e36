"""Writes the workloads that ship with loadgen: look-alikes of the three in the article on agentic workloads.

    python -m scripts.lookalikes

Applied Compute's article states means and tails, not data: the rows are drawn from log-normal distributions that have
them. Each quantity is scaled to its mean exactly, then cut at its greatest value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import msgspec
import zstandard

from loadgen.datasets import SHIPPED, shipped_path
from tracefile.hashing.splitmix64 import GOLDEN, mix64
from tracefile.importers.trie import TrieRow

ROWS = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Quantity with a tail: a log-normal distribution cut at ``most``."""

    mean: float
    """Of the rows as they are written, but for the cut."""
    spread: float
    """Standard deviation of the logarithm: 1 makes p99 about ten times the median, 2 a hundred times."""
    most: float


@dataclass(frozen=True, slots=True)
class Lookalike:
    """Shapes of a workload; lengths in tokens."""

    turns: Shape
    input_prompt: Shape
    response: Shape
    tool_output: Shape
    tool_latency_s: Shape
    final_response: Shape


# Stated of coding: a mean of about 20 turns, a smaller prompt, a shorter final response, a heavier tail of latencies.
# Of office work: means of 41 turns and a prompt of 8.9k, larger tool outputs, much longer final responses. Of code QA:
# up to 200 turns. Of all: responses centred at 200 to 300 tokens and tool outputs at 500, with tails into the tens of
# thousands, latencies about a second, to hundreds. A centre is taken for a median.
LOOKALIKES = {
    "agentic-coding": Lookalike(
        turns=Shape(20, 0.6, 120),
        input_prompt=Shape(4_500, 0.3, 20_000),
        response=Shape(440, 1.1, 30_000),
        tool_output=Shape(1_120, 1.3, 40_000),
        tool_latency_s=Shape(4.9, 1.9, 600),
        final_response=Shape(320, 0.7, 4_000),
    ),
    "code-qa": Lookalike(
        turns=Shape(26, 1.0, 200),
        input_prompt=Shape(6_000, 0.4, 30_000),
        response=Shape(360, 1.0, 30_000),
        tool_output=Shape(1_080, 1.3, 40_000),
        tool_latency_s=Shape(1.2, 1.2, 120),
        final_response=Shape(700, 0.7, 8_000),
    ),
    "office-work": Lookalike(
        turns=Shape(41, 0.6, 200),
        input_prompt=Shape(8_900, 0.3, 40_000),
        response=Shape(440, 1.1, 30_000),
        tool_output=Shape(1_700, 1.4, 50_000),
        tool_latency_s=Shape(2.0, 1.4, 300),
        final_response=Shape(1_900, 0.8, 20_000),
    ),
}


def rows(name: str) -> list[TrieRow]:
    """Rows of a look-alike, the same on every machine."""
    shape = LOOKALIKES[name]
    seed = list(LOOKALIKES).index(name) << 8
    turns = [round(value) for value in drawn(shape.turns, ROWS, seed + 1)]
    total = sum(turns)
    prompts = drawn(shape.input_prompt, ROWS, seed + 2)
    finals = drawn(shape.final_response, ROWS, seed + 3)
    responses, outputs, latencies_s = (
        drawn(kind, total, seed + 4 + number)
        for number, kind in enumerate((shape.response, shape.tool_output, shape.tool_latency_s))
    )
    made = []
    end = 0
    for row, count in enumerate(turns):
        start, end = end, end + count
        made.append(
            TrieRow(
                num_turns=count,
                input_prompt_length=_tokens(prompts[row]),
                assistant_response_length=[_tokens(value) for value in responses[start:end]],
                tool_call_output_length=[_tokens(value) for value in outputs[start:end]],
                tool_call_latency=[round(value, 3) for value in latencies_s[start:end]],
                final_assistant_response_length=_tokens(finals[row]),
            )
        )
    return made


def drawn(shape: Shape, count: int, stream: int) -> list[float]:
    """Values of a shape: stratified, so that few of them have its mean and its tail, and in a random order."""
    normal = NormalDist()
    quantiles = [math.exp(shape.spread * normal.inv_cdf((place + 0.5) / count)) for place in range(count)]
    scale = shape.mean / fmean(quantiles)
    values = [min(scale * value, shape.most) for value in quantiles]
    return [values[place] for place in _shuffled(count, stream)]


def _shuffled(count: int, stream: int) -> Sequence[int]:
    return sorted(range(count), key=lambda place: mix64(mix64(stream) + (place + 1) * GOLDEN))


def _tokens(value: float) -> int:
    return max(1, round(value))


def main() -> None:
    for name in SHIPPED:
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows(name))
        shipped_path(name).write_bytes(zstandard.ZstdCompressor(level=19).compress(lines))


if __name__ == "__main__":
    main()
