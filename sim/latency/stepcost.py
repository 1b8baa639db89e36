"""Work of a step in the terms of the latency model, and its duration. mypyc compiles this module.

A row holds one count per term, in the order of ``sim.latency.terms.TERMS``, which explains the terms. A new term is a
``Term`` there and a line in the function here that counts it; in ``decode_step_ms`` too, if steps of decodes have it.
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
REST_MS: Final = 200.0
"""Rest after which 1 − 1/e of its cost is there; 100 to 400 predict captures of a real engine equally well."""


class StepCost:
    """Counts the work of steps and what it costs. ``costs``: by term.

    ``row``: counts of the step in hand, those of receiving requests on a shared core included.
    """

    def __init__(self, costs: list[float]) -> None:
        self.costs: vec[float] = vec[float](costs)
        self.row: vec[float] = vec[float]([0.0] * 14)
        self._step_ms: float = costs[STEPS]
        self._decode_ms: float = costs[DECODES]
        self._kv_token_ms: float = costs[KV_TOKENS]
        self._repeated_kv_token_ms: float = costs[REPEATED_KV_TOKENS]

    def clear(self) -> None:
        """Begin an empty row."""
        row = self.row
        for term in range(NUM_ROW_TERMS):
            row[term] = 0.0

    def count_step(self, step: Step, step_end_ms: float) -> None:
        """Count a composed step; ``step_end_ms``: end of the engine's step before, minus infinity: there was none.

        A rest lasts until the arrival of the step's first request: a fit knows it without the API server's costs.
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
            self._count_rest(step.shares[0].request.arrival_ms - step_end_ms)

    def count_decode_step(self, decodes: float, kv_tokens: float, repeated_tokens: float) -> None:
        """Count a step of decodes alone, which follows another."""
        self.clear()
        self.row[STEPS] = 1.0
        self.count_decodes(decodes, kv_tokens, repeated_tokens)

    def count_reception(self, requests: float, prompt_tokens: float) -> None:
        """Count the API server's work on requests that arrive, with ``prompt_tokens`` together; parts in fractions."""
        row = self.row
        row[RECEIVED] += requests
        row[RECEIVED_TOKENS] += prompt_tokens

    def step_ms(self) -> float:
        """Duration of the step in the row: the cost of its terms, summed in their order."""
        costs = self.costs
        row = self.row
        duration_ms = 0.0
        for term in range(NUM_STEP_TERMS):
            duration_ms += costs[term] * row[term]
        return duration_ms

    def decode_step_ms(self, decodes: float, kv_tokens: float, repeated_tokens: float) -> float:
        """Duration of a step that ``count_decode_step`` would count, to the bit."""
        repeated = min(repeated_tokens, kv_tokens)
        duration_ms = self._step_ms + self._decode_ms * decodes + self._kv_token_ms * (kv_tokens - repeated)
        return duration_ms + self._repeated_kv_token_ms * repeated

    def reception_ms(self, prompt_tokens: i64) -> float:
        """Time that the API server takes to receive a request, before the scheduler gets it."""
        return self.costs[RECEIVED] + self.costs[RECEIVED_TOKENS] * float(prompt_tokens)

    def delivery_ms(self, prompt_tokens: i64) -> float:
        """Time from the step's end of first tokens to when clients see them, for ``prompt_tokens`` together."""
        return self.costs[DELIVERED_TOKENS] * float(prompt_tokens)

    def count_chunk(self, tokens: i64, depth: i64) -> None:
        """Count a prefill chunk of ``tokens`` whose request has KV of ``depth`` tokens before it."""
        row = self.row
        half_square = float(tokens * tokens) / 2.0
        row[PREFILL_TOKENS] += float(tokens)
        row[ATTENTION] += float(tokens * depth) + half_square
        row[CHUNKS] += 1.0
        row[DEPTHS] += float(depth)
        row[SQUARES] += half_square
        row[PREFILL_STEPS] = 1.0

    def count_decodes(self, requests: float, kv_tokens: float, repeated_tokens: float) -> None:
        """Count requests that each compute one token, on ``kv_tokens`` of KV together.

        ``repeated_tokens``: KV tokens that running requests hold and another request held before them. What a prefill
        of the step holds is in it, so it may be more than ``kv_tokens``.
        """
        row = self.row
        repeated = min(repeated_tokens, kv_tokens)
        row[DECODES] += requests
        row[KV_TOKENS] += kv_tokens - repeated
        row[REPEATED_KV_TOKENS] += repeated

    def _count_rest(self, rest_ms: float) -> None:
        """Count the engine's rest before the step, whose chunks are counted; 0 and less: it follows another step."""
        if rest_ms > 0.0:
            lasted = 1.0 - exp(-rest_ms / REST_MS)
            self.row[RESTED_STEPS] = lasted
            self.row[RESTED_DEPTHS] = lasted * self.row[DEPTHS]
