"""How long things take: a step of the engine, and the front end before it.

    step_ms = t0 + a·prefill tokens + b·Σ chunk·(depth + chunk/2) + c·decoding requests + d·their KV tokens
    entry   = arrival + f0 + f1·prompt tokens
    first token seen = its step's end + g·prompt tokens

A request's first token appears at the end of the step that computes the last of its prompt, so its TTFT is the front
end's time, the wait for the step in flight, the steps up to that one, and what the front end takes to send a first
token: an engine that gives prompts back, or counts them, does it then. docs/model.md explains each term.
"""

from typing import Literal

import msgspec

from sim.latency.terms import EXTRA_STEP_TERMS, STEP_TERMS, StepRow, step_row
from sim.vllm.scheduler import Step

FrontendPlacement = Literal["parallel", "serial", "shared_core"]
"""``parallel``: every request's front-end time is its own. ``serial``: one request at a time, as one event loop does.
``shared_core``: serial, and on the engine's core, so each of the two takes twice as long while the other has work."""


class StepModel(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Cost of each term of a step. The names are those of ``features.STEP_TERMS``, where the units are."""

    t0_ms: float
    per_prefill_token_ms: float
    per_attention_token2_ms: float
    per_decode_ms: float
    per_kv_token_ms: float
    per_prefill_chunk_ms: float = 0.0
    per_prefill_depth_ms: float = 0.0
    per_chunk_square_ms: float = 0.0
    prefill_step_ms: float = 0.0

    def row_ms(self, row: StepRow) -> float:
        """Duration of a step counted as ``row``, ms."""
        duration_ms = (
            self.t0_ms
            + self.per_prefill_token_ms * row[1]
            + self.per_attention_token2_ms * row[2]
            + self.per_decode_ms * row[3]
            + self.per_kv_token_ms * row[4]
        )
        if row[5]:
            duration_ms += (
                self.per_prefill_chunk_ms * row[5]
                + self.per_prefill_depth_ms * row[6]
                + self.per_chunk_square_ms * row[7]
                + self.prefill_step_ms
            )
        return duration_ms

    def step_ms(self, step: Step) -> float:
        """Duration of ``step``, ms."""
        return self.row_ms(step_row(step))

    def coefficients(self) -> tuple[float, ...]:
        """The parameters in the order of ``STEP_TERMS``."""
        return tuple(getattr(self, term.name) for term in STEP_TERMS)

    def extra_terms(self) -> tuple[str, ...]:
        """Names of the terms beyond the default five that this model uses."""
        return tuple(name for name in EXTRA_STEP_TERMS if getattr(self, name) != 0.0)


class FrontendModel(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the HTTP server does to a request before the scheduler sees it, and to its first token."""

    f0_ms: float
    f1_ms_per_prompt_token: float
    delivery_ms_per_prompt_token: float = 0.0
    placement: FrontendPlacement = "parallel"

    def work_ms(self, prompt_tokens: int) -> float:
        """Time to take in a request of ``prompt_tokens``, ms."""
        return self.f0_ms + self.f1_ms_per_prompt_token * prompt_tokens

    def delivery_ms(self, prompt_tokens: int) -> float:
        """Time from a first token's step to when its client sees it, ms."""
        return self.delivery_ms_per_prompt_token * prompt_tokens


class FrontendClock:
    """When requests get through the front end, in virtual and in real time alike; ``shared_core`` is not its matter."""

    __slots__ = ("_free_ms", "_frontend")

    def __init__(self, frontend: FrontendModel) -> None:
        self._frontend = frontend
        self._free_ms = float("-inf")

    def entry_ms(self, arrival_ms: float, work_ms: float) -> float:
        """When the front end hands over a request that takes it ``work_ms``: after its arrival, or after the one before
        it."""
        if self._frontend.placement == "parallel":
            return arrival_ms + work_ms
        self._free_ms = max(arrival_ms, self._free_ms) + work_ms
        return self._free_ms
