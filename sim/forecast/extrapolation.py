"""Warnings of a forecast about conditions that no capture showed."""

from collections.abc import Iterator

import numpy as np

from sim.forecast.saturation import PointRun
from sim.latency.modelfile import Model, Parameter
from sim.latency.terms import ATTENTION, DECODES, KV_TOKENS, PREFILL_TOKENS, STEP_TERMS
from sim.vllm.config import EngineConfig

MATTERS = 0.05
"""Share of the step time from which a parameter that the captures leave open is worth a warning."""
FARTHER = 1.25
"""How much more of something than the capture had is out of its range."""
_EXTENTS = {
    "requests decoding in one step": DECODES,
    "KV tokens of the decoding requests in one step": KV_TOKENS,
    "prompt tokens in one step": PREFILL_TOKENS,
    "attention work in one step (chunk × depth, tokens²)": ATTENTION,
}


def extrapolations(
    model: Model, captured: PointRun, scenario: PointRun, engine: EngineConfig, other: EngineConfig
) -> Iterator[str]:
    """Yield warnings about ``scenario``, a run on ``other``, beside the run ``captured`` on ``engine``."""
    yield from open_parameters(model, scenario, captured)
    yield from _larger_steps(captured, scenario)
    if other.block_size != engine.block_size:
        yield (
            f"blocks of {other.block_size} tokens: the captures are of {engine.block_size}; that steps take as long is "
            "assumed"
        )
    if other.max_num_batched_tokens > engine.max_num_batched_tokens:
        yield (
            f"steps of up to {other.max_num_batched_tokens:,} tokens: the captures' had at most "
            f"{engine.max_num_batched_tokens:,}"
        )


def open_parameters(model: Model, run: PointRun, captured: PointRun | None = None) -> Iterator[str]:
    """Yield parameters that are not identified and may take a large share of the step time of ``run``."""
    for column, term in enumerate(STEP_TERMS):
        name, parameter = term.name, model.parameters.get(term.name)
        if parameter is None or parameter.identified:
            continue
        share = _most_share(run, column, parameter)
        known = 0.0 if captured is None else FARTHER * _most_share(captured, column, parameter)
        if share >= max(MATTERS, known):
            why = f" ({parameter.note})" if parameter.note else ""
            yield f"{name} is not identified{why}, and up to {share:.0%} of the step time may be its"


def _most_share(run: PointRun, column: int, parameter: Parameter) -> float:
    times_ms = run.counts.sum(axis=0) * run.costs
    own_ms = float(run.counts[:, column].sum()) * max(parameter.value, parameter.high or 0.0)
    rest_ms = float(times_ms.sum() - times_ms[column])
    return own_ms / (own_ms + rest_ms) if own_ms else 0.0


def _larger_steps(captured: PointRun, scenario: PointRun) -> Iterator[str]:
    for what, column in _EXTENTS.items():
        seen, there = (float(np.max(run.counts[:, column], initial=0.0)) for run in (captured, scenario))
        if there > FARTHER * max(seen, 1.0):
            yield f"up to {there:,.0f} {what}: the capture had at most {seen:,.0f}"
