"""Identification: parameters that the captures determine, parameters left open, and the capture that settles them."""

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
"""Sizes that differ by less are all about one size."""
_SOME = 5
_SEVERAL_STEPS = 2
"""So many steps' tokens a cold prompt should have at least, so that depth shows."""
LEAST_INTERVALS = 20
_LOOSE = 0.05
"""An interval wider than its parameter's value leaves that open, unless the captures range as far as is useful and it
moves the most affected tenth of their intervals by no more than this."""
_SAME = 1e-6
"""Columns of which some combination is nearly nothing, against 1 for each by itself, are counts of the same things."""
_MEMBER = 0.1
"""Share in such a combination of those that are told about."""
_STEPS_DEEP = 5
"""How many steps' tokens the longest prompt of the next capture has, where the engine takes such."""
_PARALLEL = 16
_ALLOWED = "the captures allow anything from"


@dataclass(frozen=True, slots=True)
class Coverage:
    """Ranges that captures cover; in tokens where no unit is said."""

    step_tokens: int
    shortest_cold: int
    """Uncached tokens of a request with a TTFT."""
    longest_cold: int
    longest_warm: int
    """The longest prompt of which most was cached; 0: none was."""
    answers_at_once: int
    """Most requests that decoded in one step."""
    shallowest_answer: int
    """Fewest tokens behind an output while it was generated, as the mean over the outputs at once."""
    deepest_answer: int
    idle_arrivals: int
    """Requests that came to an idle engine and whose first token was seen."""

    def __str__(self) -> str:
        warm = f"warm ones of up to {self.longest_warm:,}" if self.longest_warm else "none warm"
        return (
            f"cold prompts of {self.shortest_cold:,} to {self.longest_cold:,} tokens ({self.step_tokens:,} a step), "
            f"{warm}; up to {self.answers_at_once} outputs at once, behind them {self.shallowest_answer:,} to "
            f"{self.deepest_answer:,} tokens; {self.idle_arrivals} arrivals at an idle engine"
        )


def coverage_of(seen: Observations, requests: Requests, step_tokens: int) -> Coverage:
    """Return the ranges of the captures; a range goes as far as some requests or intervals reach, not one alone."""
    uncached = requests.uncached_tokens
    warm = requests.prompt_tokens[uncached < requests.prompt_tokens / 2]
    decoding = ~seen.is_prefill & (seen.counts[:, DECODES] > 0.0)
    counts = seen.counts[decoding]
    depths = (counts[:, KV_TOKENS] + counts[:, REPEATED_KV_TOKENS]) / counts[:, DECODES]
    return Coverage(
        step_tokens=step_tokens,
        shortest_cold=_quantile(uncached, 0.02),
        longest_cold=_reached(uncached, _SOME),
        longest_warm=_reached(warm, _SOME),
        answers_at_once=_reached(counts[:, DECODES] / seen.steps[decoding], LEAST_INTERVALS),
        shallowest_answer=_quantile(depths, 0.02),
        deepest_answer=_reached(depths, LEAST_INTERVALS),
        idle_arrivals=int(seen.opens.sum()),
    )


def _quantile(values: FloatArray, level: float) -> int:
    return round(float(np.quantile(values, level, method="nearest"))) if len(values) else 0


def _reached(values: FloatArray, count: int) -> int:
    """Return the value that ``count`` of ``values`` reach; of fewer, the least."""
    return round(float(np.sort(values)[-min(count, len(values))])) if len(values) else 0


def lack(name: str, held: Coverage) -> str | None:
    """Return in words the range that parameter ``name`` lacks; None: no known range is missing."""
    no_warm = f"the longest warm prompt has {held.longest_warm:,} tokens" if held.longest_warm else "no prompt was warm"
    no_warm_prompts = held.longest_warm < held.step_tokens, no_warm
    lacks = {
        "per_prefill_token_ms": (
            held.longest_cold < _WIDE * max(held.shortest_cold, 1),
            f"cold prompts are all of {held.shortest_cold:,} to {held.longest_cold:,} tokens",
        ),
        "per_attention_token2_ms": (
            held.longest_cold < _SEVERAL_STEPS * held.step_tokens,
            f"no cold prompt is longer than {held.longest_cold:,} tokens, and a step takes {held.step_tokens:,}",
        ),
        "per_decode_ms": (
            held.answers_at_once < _WIDE,
            f"never more than {held.answers_at_once} outputs were generated at once",
        ),
        "per_kv_token_ms": (
            held.deepest_answer < max(_WIDE * held.shallowest_answer, held.step_tokens),
            f"outputs had {held.shallowest_answer:,} to {held.deepest_answer:,} tokens behind them",
        ),
        "frontend_base_ms": (
            held.idle_arrivals < _SOME,
            f"requests that came to an idle engine: {held.idle_arrivals}",
        ),
        "frontend_ms_per_prompt_token": no_warm_prompts,
        "delivery_ms_per_prompt_token": no_warm_prompts,
    }
    lacking, said = lacks.get(name, (False, ""))
    return said if lacking else None


@dataclass(frozen=True, slots=True)
class Unidentified:
    """A parameter that the captures leave open."""

    name: str
    why: str
    capture: str
    range_missing: bool = True
    """False: the captures have a range that is known to suffice, so that noise hides the parameter."""


def require_enough(uncached_tokens: FloatArray, gaps: int) -> None:
    """Raise InputError that names the capture to make; ``uncached_tokens``: of each request with a TTFT."""
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
            f"uncached prompts are all of about one size ({low:.0f} to {high:.0f} tokens), so that a step's constant "
            f"cannot be told from its cost per token: capture {TERMS[PREFILL_TOKENS].capture}, as loadgen --pattern "
            "calibration sends them"
        )


def find_unidentified(
    seen: Observations, free: list[int], parameters: FloatArray, draws: FloatArray, coverage: Coverage
) -> list[Unidentified]:
    """Return parameters of ``free`` that do not enter, or whose bootstrap ``draws`` (rounds, terms) spread too wide."""
    found, twins = [], confounded(seen, free)
    for column in free:
        name = TERMS[column].name
        lacking = lack(name, coverage)
        why = _open(seen, column, parameters, draws, matters=lacking is not None)
        if column in twins:
            why = f"only its sum with {' and '.join(TERMS[other].name for other in twins[column])} shows"
        if why is not None:
            found.append(_unidentified(column, why, lacking))
    return found


def _unidentified(column: int, why: str, lacking: str | None) -> Unidentified:
    name, capture = TERMS[column].name, TERMS[column].capture
    said = why if lacking is None else f"{lacking}; {why}"
    return Unidentified(name, said, capture, lacking is not None or not why.startswith(_ALLOWED))


def confounded(seen: Observations, free: list[int]) -> dict[int, list[int]]:
    """Return terms whose counts are the same combination of other terms' in every interval, with these others."""
    counts = seen.counts[:, free] / np.maximum(seen.seen_ms, 1e-6)[:, None]
    size = np.sqrt((counts**2).sum(axis=0))
    live = np.flatnonzero(size > 0.0)
    unit = counts[:, live] / size[live]
    values, vectors = np.linalg.eigh(unit.T @ unit)
    twins: dict[int, list[int]] = {}
    for vector in vectors.T[values < _SAME]:
        members = [free[live[place]] for place in np.flatnonzero(np.abs(vector) > _MEMBER)]
        for one in members:
            twins[one] = sorted({*twins.get(one, []), *members} - {one})
    return twins


def _open(seen: Observations, column: int, parameters: FloatArray, draws: FloatArray, *, matters: bool) -> str | None:
    """Reason why a parameter is open; None: it is not, or it does not matter in these captures."""
    counts = seen.counts[:, column]
    if not counts.any():
        return "nothing in the captures depends on it"
    if not len(draws):
        return None
    low, high = np.quantile(draws[:, column], [0.025, 0.975])
    share = counts / np.maximum(seen.counts @ parameters, 1e-6)
    reach = max(float(np.quantile(share[rows], 0.9)) for rows in (counts >= 0.0, seen.is_prefill) if rows.any())
    if high - low <= parameters[column] or (not matters and (high - low) * reach <= _LOOSE):
        return None
    return f"{_ALLOWED} {low:.3g} to {high:.3g}"


def next_capture(config: EngineConfig) -> str:
    """Return the command of the capture that settles open parameters."""
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


def describe_open(unidentified: Sequence[Unidentified], command: str) -> Iterator[str]:
    """Yield open parameters, and the capture that is missing."""
    yield "Not identified by these captures:"
    yield from (f"  {one.name}: {one.why}; capture {one.capture}" for one in unidentified)
    if any(one.range_missing for one in unidentified):
        yield "The missing capture, in some minutes, through a tap, on an engine that does nothing else:"
    else:
        yield "The captures have the range, and noise hides the rest. One more, through a tap, on an idle machine:"
    yield f"  {command}"
    yield "with a --seed that no capture had; then fit all captures together."
