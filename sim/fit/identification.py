"""Identification: parameters that captures determine, open parameters, and the capture that identifies them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sim.fit.observations import Observations
from sim.fit.residuals import Requests
from sim.latency.stepcost import DECODES, KV_TOKENS, PREFILL_TOKENS, REPEATED_KV_TOKENS
from sim.latency.terms import TERMS
from sim.vllm.config import EngineConfig
from tracefile.records.arrays import FloatArray
from tracefile.records.errors import InputError

_WIDE = 4
"""Smallest ratio of sizes that identifies a slope."""
_MIN_REQUESTS = 5
_SEVERAL_STEPS = 2
"""Prefill steps of the longest cold prompt that attention cost needs."""
LEAST_INTERVALS = 20
_LOOSE = 0.05
"""An interval wider than its parameter's value leaves that open, unless the captures range as far as is useful and it
moves the most affected tenth of their intervals by no more than this."""
_SAME = 1e-6
"""Largest eigenvalue of a combination of unit columns that counts as linear dependence."""
_MEMBER = 0.1
"""Smallest weight of a reported column in the combination."""
_STEPS_DEEP = 5
"""Prefill steps of the longest prompt in the next capture, if the engine accepts it."""
_PARALLEL = 16
_ALLOWED = "the captures allow anything from"


@dataclass(frozen=True, slots=True)
class Coverage:
    """Ranges of prefill and decode work that captures cover; in tokens unless stated."""

    step_tokens: int
    shortest_cold: int
    """Uncached tokens of a request with a TTFT."""
    longest_cold: int
    longest_warm: int
    """Longest prompt with a prefix hit of more than half; 0: none."""
    answers_at_once: int
    """Most requests that decoded in one step."""
    shallowest_answer: int
    """Fewest KV tokens per decoding request, as a mean over the batch."""
    deepest_answer: int
    idle_arrivals: int
    """Requests with a TTFT that arrived at an idle engine."""

    def __str__(self) -> str:
        warm = f"warm ones of up to {self.longest_warm:,}" if self.longest_warm else "none warm"
        return (
            f"cold prompts of {self.shortest_cold:,} to {self.longest_cold:,} tokens ({self.step_tokens:,} a step), "
            f"{warm}; up to {self.answers_at_once} decodes a step, with {self.shallowest_answer:,} to "
            f"{self.deepest_answer:,} KV tokens each; {self.idle_arrivals} arrivals at an idle engine"
        )


def coverage_of(observed: Observations, requests: Requests, step_tokens: int) -> Coverage:
    """Return the ranges of prompts, decode batches and KV depth; several requests or intervals reach each end."""
    uncached = requests.uncached_tokens
    warm = requests.prompt_tokens[uncached < requests.prompt_tokens / 2]
    decoding = ~observed.is_prefill & (observed.counts[:, DECODES] > 0.0)
    counts = observed.counts[decoding]
    depths = (counts[:, KV_TOKENS] + counts[:, REPEATED_KV_TOKENS]) / counts[:, DECODES]
    return Coverage(
        step_tokens=step_tokens,
        shortest_cold=_quantile(uncached, 0.02),
        longest_cold=_reached(uncached, _MIN_REQUESTS),
        longest_warm=_reached(warm, _MIN_REQUESTS),
        answers_at_once=_reached(counts[:, DECODES] / observed.steps[decoding], LEAST_INTERVALS),
        shallowest_answer=_quantile(depths, 0.02),
        deepest_answer=_reached(depths, LEAST_INTERVALS),
        idle_arrivals=int(observed.opens.sum()),
    )


def _quantile(values: FloatArray, level: float) -> int:
    return round(float(np.quantile(values, level, method="nearest"))) if len(values) else 0


def _reached(values: FloatArray, count: int) -> int:
    return round(float(np.sort(values)[-min(count, len(values))])) if len(values) else 0


def missing_range(name: str, reach: Coverage) -> str | None:
    """Return the range of prompts, decodes or arrivals that parameter ``name`` lacks; None: no known gap."""
    no_warm = (
        f"the longest warm prompt has {reach.longest_warm:,} tokens" if reach.longest_warm else "no prompt was warm"
    )
    no_warm_prompts = reach.longest_warm < reach.step_tokens, no_warm
    lacks = {
        "per_prefill_token_ms": (
            reach.longest_cold < _WIDE * max(reach.shortest_cold, 1),
            f"cold prompts are all of {reach.shortest_cold:,} to {reach.longest_cold:,} tokens",
        ),
        "per_attention_token2_ms": (
            reach.longest_cold < _SEVERAL_STEPS * reach.step_tokens,
            f"no cold prompt is longer than {reach.longest_cold:,} tokens, and a step takes {reach.step_tokens:,}",
        ),
        "per_decode_ms": (
            reach.answers_at_once < _WIDE,
            f"never more than {reach.answers_at_once} outputs were generated at once",
        ),
        "per_kv_token_ms": (
            reach.deepest_answer < max(_WIDE * reach.shallowest_answer, reach.step_tokens),
            f"outputs had {reach.shallowest_answer:,} to {reach.deepest_answer:,} tokens behind them",
        ),
        "frontend_base_ms": (
            reach.idle_arrivals < _MIN_REQUESTS,
            f"requests that came to an idle engine: {reach.idle_arrivals}",
        ),
        "frontend_ms_per_prompt_token": no_warm_prompts,
        "delivery_ms_per_prompt_token": no_warm_prompts,
    }
    is_missing, reason = lacks.get(name, (False, ""))
    return reason if is_missing else None


@dataclass(frozen=True, slots=True)
class Unidentified:
    """Parameter that the captures do not identify."""

    name: str
    why: str
    capture: str
    range_missing: bool = True
    """False: the range suffices, but noise hides the parameter."""


def require_enough(uncached_tokens: FloatArray, gaps: int) -> None:
    """Raise InputError with the missing capture; ``uncached_tokens``: to prefill, per request with a TTFT."""
    ttfts = len(uncached_tokens)
    if ttfts < LEAST_INTERVALS:
        raise InputError(
            f"only {ttfts} requests have a TTFT and a prompt length; expected at least {LEAST_INTERVALS} streamed "
            "ones: capture loadgen --pattern calibration"
        )
    if gaps < LEAST_INTERVALS:
        raise InputError(
            f"only {gaps} gaps between tokens; expected at least {LEAST_INTERVALS}, of streamed outputs of 8 tokens "
            "and more: capture loadgen --pattern calibration"
        )
    low, high = np.quantile(uncached_tokens, [0.05, 0.95])
    if high < 2.0 * max(low, 1.0):
        raise InputError(
            f"uncached prompts have nearly equal lengths ({low:.0f} to {high:.0f} tokens): a step's constant and its "
            f"cost per token are not separable; capture {TERMS[PREFILL_TOKENS].capture}, as loadgen --pattern "
            "calibration sends them"
        )


def find_unidentified(
    observed: Observations, free: list[int], parameters: FloatArray, draws: FloatArray, coverage: Coverage
) -> list[Unidentified]:
    """Return parameters of ``free`` without effect, or with wide bootstrap ``draws`` (rounds, terms)."""
    unidentified, twins = [], confounded(observed, free)
    for column in free:
        name = TERMS[column].name
        missing = missing_range(name, coverage)
        why = _open(observed, column, parameters, draws, matters=missing is not None)
        if column in twins:
            why = f"only its sum with {' and '.join(TERMS[other].name for other in twins[column])} shows"
        if why is not None:
            unidentified.append(_unidentified(column, why, missing))
    return unidentified


def _unidentified(column: int, why: str, missing: str | None) -> Unidentified:
    name, capture = TERMS[column].name, TERMS[column].capture
    reason = why if missing is None else f"{missing}; {why}"
    return Unidentified(name, reason, capture, missing is not None or not why.startswith(_ALLOWED))


def confounded(observed: Observations, free: list[int]) -> dict[int, list[int]]:
    """Return terms whose counts are a linear combination of other terms in all intervals, with the other terms."""
    counts = observed.counts[:, free] / np.maximum(observed.measured_ms, 1e-6)[:, None]
    size = np.sqrt((counts**2).sum(axis=0))
    live = np.flatnonzero(size > 0.0)
    unit = counts[:, live] / size[live]
    values, vectors = np.linalg.eigh(unit.T @ unit)
    twins: dict[int, list[int]] = {}
    for vector in vectors.T[values < _SAME]:
        members = [free[live[index]] for index in np.flatnonzero(np.abs(vector) > _MEMBER)]
        for member in members:
            twins[member] = sorted({*twins.get(member, []), *members} - {member})
    return twins


def _open(
    observed: Observations, column: int, parameters: FloatArray, draws: FloatArray, *, matters: bool
) -> str | None:
    counts = observed.counts[:, column]
    if not counts.any():
        return "nothing in the captures depends on it"
    if not len(draws):
        return None
    low, high = np.quantile(draws[:, column], [0.025, 0.975])
    share = counts / np.maximum(observed.counts @ parameters, 1e-6)
    reach = max(float(np.quantile(share[rows], 0.9)) for rows in (counts >= 0.0, observed.is_prefill) if rows.any())
    if high - low <= parameters[column] or (not matters and (high - low) * reach <= _LOOSE):
        return None
    return f"{_ALLOWED} {low:.3g} to {high:.3g}"


def next_capture(config: EngineConfig) -> str:
    """Return the ``loadgen`` command of the capture that identifies open parameters: prompt tokens and batch size."""
    longest = min(
        _STEPS_DEEP * config.max_num_batched_tokens,
        config.longest_request * 2 // 3,
        config.usable_blocks * config.block_size // 3,  # two of them at once, and room for what comes beside
    )
    scale = 10 ** max(0, len(str(longest)) - 2)
    shortest = min(64, max(1, longest // 8))
    return (
        f"loadgen --url http://TAP -o next.jsonl.zst --pattern calibration --prompt-tokens "
        f"{shortest}:{longest // scale * scale} --parallel {max(2, min(_PARALLEL, config.max_num_seqs))}"
    )


def describe_open(unidentified: Sequence[Unidentified], command: str, *, reasons: bool = True) -> Iterator[str]:
    """Yield parameters that no capture identifies, each with its reason if ``reasons``, and the command that captures
    the missing load."""
    if reasons:
        yield "Not identified by these captures:"
        yield from (f"  {parameter.name}: {parameter.why}; capture {parameter.capture}" for parameter in unidentified)
    if any(parameter.range_missing for parameter in unidentified):
        yield "next: capture the missing range for a few minutes, through a tap, on an otherwise idle engine:"
    else:
        yield "next: the captures have the range, but too much noise; capture once more, on an idle machine:"
    program, _, flags = command.partition(" --pattern ")
    yield f"  {program} \\"
    yield f"    --pattern {flags}"
    yield "with a --seed that no capture had; then fit all captures together."
