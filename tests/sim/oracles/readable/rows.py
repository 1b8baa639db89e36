"""Term counts of a scheduler step, as plain functions of lists."""

from collections.abc import MutableSequence, Sequence
from math import exp

from sim.latency.stepcost import (
    ATTENTION,
    CHUNKS,
    DECODES,
    DELIVERED_TOKENS,
    DEPTHS,
    IDLE_MS,
    KV_TOKENS,
    NUM_STEP_TERMS,
    PREFILL_STEPS,
    PREFILL_TOKENS,
    RECEIVED,
    RECEIVED_TOKENS,
    REPEATED_KV_TOKENS,
    RESTED_DEPTHS,
    RESTED_STEPS,
    SQUARES,
    STEPS,
)
from sim.latency.terms import FrontendPlacement
from tests.sim.oracles.readable.scheduler import Step
from tracefile.records.arrays import FloatArray

Numbers = Sequence[float] | FloatArray
Row = MutableSequence[float] | FloatArray


def begin_row(row: Row) -> None:
    for position in range(len(row)):
        row[position] = 0.0
    row[STEPS] = 1.0


def count_chunk(row: Row, tokens: int, depth: int) -> None:
    """Count a prefill chunk of ``tokens`` after ``depth`` tokens of KV cache."""
    half_square = tokens * tokens / 2
    row[PREFILL_TOKENS] += tokens
    row[ATTENTION] += tokens * depth + half_square
    row[CHUNKS] += 1.0
    row[DEPTHS] += depth
    row[SQUARES] += half_square
    row[PREFILL_STEPS] = 1.0


def count_decodes(row: Row, requests: int, kv_tokens: int, repeated_tokens: int) -> None:
    """Count ``requests`` that each compute one token, on ``kv_tokens`` of KV together.

    ``repeated_tokens``: KV tokens that running requests hold and another request held before them. What a prefill of
    the step holds is in it, so it may be more than ``kv_tokens``.
    """
    repeated = min(repeated_tokens, kv_tokens)
    row[DECODES] += requests
    row[KV_TOKENS] += kv_tokens - repeated
    row[REPEATED_KV_TOKENS] += repeated


def count_rest(row: Row, rest_ms: float) -> None:
    """Count the engine's idle time before the step in ``row``, after its prefill chunks; 0 or less: no idle time."""
    if rest_ms > 0.0:
        lasted = 1.0 - exp(-rest_ms / IDLE_MS)
        row[RESTED_STEPS] = lasted
        row[RESTED_DEPTHS] = lasted * row[DEPTHS]


def row_ms(costs: Numbers, row: Numbers) -> float:
    """Return the duration of the step in ``row``: costs of its terms, summed in order."""
    duration_ms = 0.0
    for position in range(NUM_STEP_TERMS):
        duration_ms += costs[position] * row[position]
    return duration_ms


def count_reception(row: Row, requests: float, prompt_tokens: float) -> None:
    """Count the API server's work on requests that arrive, with ``prompt_tokens`` together; parts in fractions."""
    row[RECEIVED] += requests
    row[RECEIVED_TOKENS] += prompt_tokens


def reception_ms(costs: Numbers, prompt_tokens: int) -> float:
    """Time that the API server takes to receive a request, before the scheduler gets it."""
    return costs[RECEIVED] + costs[RECEIVED_TOKENS] * prompt_tokens


def delivery_ms(costs: Numbers, prompt_tokens: int) -> float:
    """Time from the step's end of first tokens to when clients see them, for requests of ``prompt_tokens`` together."""
    return costs[DELIVERED_TOKENS] * prompt_tokens


def is_decode(tokens: int, depth: int, prompt_tokens: int) -> bool:
    """Return whether a share of a step is a decode (one token after the prompt); else it is a prefill chunk."""
    return tokens == 1 and depth >= prompt_tokens


def step_row(step: Step, step_end_ms: float) -> list[float]:
    """Count a composed step; ``step_end_ms``: end of the engine's step before, minus infinity: there was none.

    A rest lasts until the arrival of the step's first request: a fit knows it without the API server's costs.
    """
    row = [0.0] * NUM_STEP_TERMS
    begin_row(row)
    decodes = kv_tokens = 0
    for request, tokens, depth, _ in step.scheduled:
        if is_decode(tokens, depth, request.prompt_tokens):
            decodes += 1
            kv_tokens += depth
        else:
            count_chunk(row, tokens, depth)
    count_decodes(row, decodes, kv_tokens, step.repeated_tokens)
    if step.scheduled:
        count_rest(row, step.scheduled[0].request.arrival_ms - step_end_ms)
    return row


class FrontendClock:
    """Times at which requests leave an API server on a core of its own, in virtual and in real time alike."""

    __slots__ = ("_free_ms", "_is_serial")

    def __init__(self, placement: FrontendPlacement) -> None:
        self._is_serial = placement != "parallel"
        self._free_ms = float("-inf")

    def entry_ms(self, arrival_ms: float, work_ms: float) -> float:
        if not self._is_serial:
            return arrival_ms + work_ms
        self._free_ms = max(arrival_ms, self._free_ms) + work_ms
        return self._free_ms
