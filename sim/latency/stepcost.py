"""Term counts of a scheduler step, and its duration by the latency model. mypyc compiles this module.

A row holds a count per term, in the order of ``sim.latency.terms.TERMS``. A new term needs a ``Term`` there and a line
here in the function that counts it; also in ``decode_step_ms``, if decode steps have it.
"""

from math import exp
from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from sim.vllm.scheduler import Step

STEPS: Final[i64] = 0
PREFILL_TOKENS: Final[i64] = 1
ATTENTION: Final[i64] = 2
DECODES: Final[i64] = 3
KV_TOKENS: Final[i64] = 4
REPEATED_KV_TOKENS: Final[i64] = 5
CHUNKS: Final[i64] = 6
DEPTHS: Final[i64] = 7
SQUARES: Final[i64] = 8
PREFILL_STEPS: Final[i64] = 9
RESTED_STEPS: Final[i64] = 10
RESTED_DEPTHS: Final[i64] = 11
NUM_STEP_TERMS: Final[i64] = 12
RECEIVED: Final[i64] = 12
RECEIVED_TOKENS: Final[i64] = 13
NUM_ROW_TERMS: Final[i64] = 14
DELIVERED_TOKENS: Final[i64] = 14
NUM_TERMS: Final[i64] = 15
IDLE_MS: Final = 200.0
"""Idle time after which 1 − 1/e of the idle cost applies; 100 to 400 predict captures of a real engine equally well."""


class StepCost:
    """Term counts of the current scheduler step, and its predicted duration. ``costs``: ms per count, by term.

    ``row``: counts of the current step, including requests received on a shared core.
    """

    def __init__(self, costs: list[float]) -> None:
        self.costs: vec[float] = vec[float](costs)
        self.row: vec[float] = vec[float]([0.0] * 14)
        self._step_ms: float = costs[STEPS]
        self._decode_ms: float = costs[DECODES]
        self._kv_token_ms: float = costs[KV_TOKENS]
        self._repeated_kv_token_ms: float = costs[REPEATED_KV_TOKENS]

    def clear(self) -> None:
        row = self.row
        for term in range(NUM_ROW_TERMS):
            row[term] = 0.0

    def count_step(self, step: Step, step_end_ms: float) -> None:
        """Count a composed scheduler step; ``step_end_ms``: end of the previous step; −infinity: no step before.

        Idle time ends at the arrival of the step's first request, which a fit observes without API server costs.
        """
        self.clear()
        self.row[STEPS] = 1.0
        decodes: i64 = 0
        kv_tokens: i64 = 0
        for number in range(step.count):
            share = step.shares[number]
            tokens = share.num_tokens
            depth = share.depth
            if tokens == 1 and depth >= share.request.prompt_tokens:
                decodes += 1
                kv_tokens += depth
            else:
                self.count_chunk(tokens, depth)
        self.count_decodes(float(decodes), float(kv_tokens), float(step.repeated_tokens))
        if step.count > 0:
            self._count_idle(step.shares[0].request.arrival_ms - step_end_ms)

    def count_decode_step(self, decodes: float, kv_tokens: float, repeated_tokens: float) -> None:
        """Count a step with decodes only, directly after another step."""
        self.clear()
        self.row[STEPS] = 1.0
        self.count_decodes(decodes, kv_tokens, repeated_tokens)

    def count_reception(self, requests: float, prompt_tokens: float) -> None:
        """Count API server work to receive requests with ``prompt_tokens`` in total; fractions: partial work."""
        row = self.row
        row[RECEIVED] += requests
        row[RECEIVED_TOKENS] += prompt_tokens

    def step_ms(self) -> float:
        """Return the predicted duration of the step in the row: costs of its terms, summed in order, in ms."""
        costs = self.costs
        row = self.row
        duration_ms = 0.0
        for term in range(NUM_STEP_TERMS):
            duration_ms += costs[term] * row[term]
        return duration_ms

    def decode_step_ms(self, decodes: float, kv_tokens: float, repeated_tokens: float) -> float:
        """Return the duration of a decode step in ms, bit for bit as after ``count_decode_step``."""
        repeated = min(repeated_tokens, kv_tokens)
        duration_ms = self._step_ms + self._decode_ms * decodes + self._kv_token_ms * (kv_tokens - repeated)
        return duration_ms + self._repeated_kv_token_ms * repeated

    def reception_ms(self, prompt_tokens: i64) -> float:
        """Return the time of the API server to receive a request, before it enters the scheduler, in ms."""
        return self.costs[RECEIVED] + self.costs[RECEIVED_TOKENS] * float(prompt_tokens)

    def delivery_ms(self, prompt_tokens: i64) -> float:
        """Return the time from the end of a step to the delivery of its first tokens, in ms."""
        return self.costs[DELIVERED_TOKENS] * float(prompt_tokens)

    def count_chunk(self, tokens: i64, depth: i64) -> None:
        """Count a prefill chunk of ``tokens`` after ``depth`` tokens of KV cache."""
        row = self.row
        half_square = float(tokens * tokens) / 2.0
        row[PREFILL_TOKENS] += float(tokens)
        row[ATTENTION] += float(tokens * depth) + half_square
        row[CHUNKS] += 1.0
        row[DEPTHS] += float(depth)
        row[SQUARES] += half_square
        row[PREFILL_STEPS] = 1.0

    def count_decodes(self, requests: float, kv_tokens: float, repeated_tokens: float) -> None:
        """Count decoding requests, which read ``kv_tokens`` of KV cache in total.

        ``repeated_tokens``: KV cache tokens that running requests share, prefilling requests included, so it may exceed
        ``kv_tokens``.
        """
        row = self.row
        repeated = min(repeated_tokens, kv_tokens)
        row[DECODES] += requests
        row[KV_TOKENS] += kv_tokens - repeated
        row[REPEATED_KV_TOKENS] += repeated

    def _count_idle(self, idle_ms: float) -> None:
        """Count the engine's idle time before the step, after its prefill chunks; 0 or less: no idle time."""
        if idle_ms > 0.0:
            saturation = 1.0 - exp(-idle_ms / IDLE_MS)
            self.row[RESTED_STEPS] = saturation
            self.row[RESTED_DEPTHS] = saturation * self.row[DEPTHS]
