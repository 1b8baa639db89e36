"""Ranges that captures cover, and the ranges that a parameter lacks to be identified."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from sim.fit.observations import Observations
from sim.fit.residuals import Requests
from sim.latency.terms import DECODES, KV_TOKENS
from tracefile.records.arrays import FloatArray

_WIDE = 4
"""Sizes that differ by less are all about one size."""
_SOME = 5
_SEVERAL_STEPS = 2
"""So many steps' tokens a cold prompt should have at least, so that depth shows."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Ranges that captures cover; in tokens where no unit is said."""

    step_tokens: int
    """Most that the engine computes in a step."""
    shortest_cold: int
    """Uncached tokens of a request with a TTFT."""
    longest_cold: int
    longest_warm: int
    """The longest prompt of which most was cached; 0: none was."""
    answers_at_once: int
    """Most requests that decoded in one step."""
    shallowest_answer: int
    """Fewest tokens behind an answer while it was generated, as the mean over the answers at once."""
    deepest_answer: int
    idle_arrivals: int
    """Requests that came to an idle engine and whose first token was seen."""

    def __str__(self) -> str:
        warm = f"warm ones of up to {self.longest_warm:,}" if self.longest_warm else "none warm"
        return (
            f"cold prompts of {self.shortest_cold:,} to {self.longest_cold:,} tokens ({self.step_tokens:,} a step), "
            f"{warm}; up to {self.answers_at_once} answers at once, behind them {self.shallowest_answer:,} to "
            f"{self.deepest_answer:,} tokens; {self.idle_arrivals} arrivals at an idle engine"
        )


def coverage_of(seen: Observations, requests: Requests, step_tokens: int) -> Coverage:
    """Return the ranges of the captures; outliers do not widen a range."""
    uncached = requests.uncached_tokens
    warm = requests.prompt_tokens[uncached < requests.prompt_tokens / 2]
    decoding = ~seen.is_prefill & (seen.counts[:, DECODES] > 0.0)
    counts = seen.counts[decoding]
    depths = counts[:, KV_TOKENS] / counts[:, DECODES]
    return Coverage(
        step_tokens=step_tokens,
        shortest_cold=_quantile(uncached, 0.02),
        longest_cold=_quantile(uncached, 0.98),
        longest_warm=_quantile(warm, 0.98),
        answers_at_once=_quantile(counts[:, DECODES] / seen.steps[decoding], 0.98),
        shallowest_answer=_quantile(depths, 0.02),
        deepest_answer=_quantile(depths, 0.98),
        idle_arrivals=int(seen.opens.sum()),
    )


def _quantile(values: FloatArray, level: float) -> int:
    return round(float(np.quantile(values, level, method="nearest"))) if len(values) else 0


def lack(name: str, coverage: Coverage) -> str | None:
    """Return in words the range that parameter ``name`` lacks; None: no known range is missing."""
    return LACKS[name](coverage) if name in LACKS else None


def _no_sizes(held: Coverage) -> str | None:
    if held.longest_cold >= _WIDE * max(held.shortest_cold, 1):
        return None
    return f"cold prompts are all of {held.shortest_cold:,} to {held.longest_cold:,} tokens"


def _no_depth(held: Coverage) -> str | None:
    if held.longest_cold >= _SEVERAL_STEPS * held.step_tokens:
        return None
    return f"no cold prompt is longer than {held.longest_cold:,} tokens, and a step takes {held.step_tokens:,}"


def _no_company(held: Coverage) -> str | None:
    if held.answers_at_once >= _WIDE:
        return None
    return f"never more than {held.answers_at_once} answers were generated at once"


def _no_depth_of_answers(held: Coverage) -> str | None:
    if held.deepest_answer >= max(_WIDE * held.shallowest_answer, held.step_tokens):
        return None
    return f"answers had {held.shallowest_answer:,} to {held.deepest_answer:,} tokens behind them"


def _no_idle_engine(held: Coverage) -> str | None:
    return None if held.idle_arrivals >= _SOME else f"requests that came to an idle engine: {held.idle_arrivals}"


def _no_warm_prompts(held: Coverage) -> str | None:
    if held.longest_warm >= held.step_tokens:
        return None
    return f"the longest warm prompt has {held.longest_warm:,} tokens" if held.longest_warm else "no prompt was warm"


LACKS: Mapping[str, Callable[[Coverage], str | None]] = {
    "per_prefill_token_ms": _no_sizes,
    "per_attention_token2_ms": _no_depth,
    "per_decode_ms": _no_company,
    "per_kv_token_ms": _no_depth_of_answers,
    "frontend_base_ms": _no_idle_engine,
    "frontend_ms_per_prompt_token": _no_warm_prompts,
    "delivery_ms_per_prompt_token": _no_warm_prompts,
}
