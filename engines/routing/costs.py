"""Prediction of a request's TTFT as a router sees it, and the policy of the least. mypyc compiles this module."""

from collections.abc import Mapping
from math import ceil

from engines.routing.load import least_costly
from engines.routing.records import RoutedEngine, RoutedRequest, RoutingCosts


def routing_costs(parameters: Mapping[str, float], step_tokens: float) -> RoutingCosts:
    """Return a router's numbers of a latency model: values by their names in model.json, others are left out."""
    known = {name: parameters.get(name, 0.0) for name in RoutingCosts._fields if name != "step_tokens"}
    return RoutingCosts(**known, step_tokens=step_tokens)


def at_speed(costs: RoutingCosts, speed: float) -> RoutingCosts:
    """Return the numbers of an engine that is ``speed`` times as fast."""
    return RoutingCosts(*[ms / speed for ms in costs])._replace(step_tokens=costs.step_tokens)


def prefill_ms(costs: RoutingCosts, tokens: float, depth: float) -> float:
    """Return the time to compute ``tokens`` of a prompt after ``depth`` tokens of KV, without the steps' own cost."""
    return tokens * (costs.per_prefill_token_ms + costs.per_attention_token2_ms * (depth + tokens / 2))


def predicted_ttfts_ms(request: RoutedRequest, engines: list[RoutedEngine]) -> list[float]:
    """Return the TTFT that each engine's costs predict for a request sent to it now.

    The API server's time, then the prefill outstanding there and that of the prompt's uncached tokens, in steps that
    decode the other requests, too. The router does not see how far a prefill has come: an outstanding one counts
    whole until its first token. Its attention is that of a prompt of mean length.
    """
    prompt_tokens, block_tokens = request.prompt_tokens, request.block_tokens
    return [
        predicted_ttft_ms(engine.costs, engine, prompt_tokens, max(1.0, prompt_tokens - engine.overlap * block_tokens))
        for engine in engines
    ]


def predicted_ttft_ms(costs: RoutingCosts, engine: RoutedEngine, prompt_tokens: int, uncached: float) -> float:
    """Return the TTFT of a prompt on an engine with these costs."""
    outstanding, requests = engine.prefill_tokens, engine.requests
    token_ms, token2_ms = costs.per_prefill_token_ms, costs.per_attention_token2_ms
    ms = costs.frontend_base_ms + prompt_tokens * (
        costs.frontend_ms_per_prompt_token + costs.delivery_ms_per_prompt_token
    )
    ms += uncached * (token_ms + token2_ms * (prompt_tokens - uncached / 2))
    step_ms = costs.t0_ms + costs.prefill_step_ms
    if requests:
        ms += outstanding * (token_ms + token2_ms * engine.held_tokens / requests / 2)
        step_ms += costs.per_decode_ms * requests + costs.per_kv_token_ms * engine.held_tokens
    return ms + ceil((outstanding + uncached) / costs.step_tokens) * step_ms


def earliest_first_token(request: RoutedRequest, engines: list[RoutedEngine]) -> int:
    """Return the engine of the least predicted TTFT; of equals, the fewest requests."""
    return least_costly(predicted_ttfts_ms(request, engines), request, engines)
