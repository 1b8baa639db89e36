"""TTFT prediction of a router, and the policy of the least predicted TTFT. mypyc compiles this module."""

from collections.abc import Mapping
from math import ceil

from engines.routing.load import least_costly
from engines.routing.records import RoutedEngine, RoutedRequest, RoutingCosts


def routing_costs(parameters: Mapping[str, float], step_tokens: float) -> RoutingCosts:
    """Return the routing costs of a latency model, from the parameters of model.json."""
    values = {name: parameters.get(name, 0.0) for name in RoutingCosts._fields if name != "step_tokens"}
    return RoutingCosts(**values, step_tokens=step_tokens)


def at_speed(costs: RoutingCosts, speed: float) -> RoutingCosts:
    """Return the costs of an engine that is ``speed`` times as fast, with the same token budget."""
    return RoutingCosts(*[ms / speed for ms in costs])._replace(step_tokens=costs.step_tokens)


def prefill_ms(costs: RoutingCosts, tokens: float, depth: float) -> float:
    """Return the prefill time of ``tokens`` after ``depth`` tokens in the KV cache, without the cost per step."""
    return tokens * (costs.per_prefill_token_ms + costs.per_attention_token2_ms * (depth + tokens / 2))


def predicted_ttfts_ms(request: RoutedRequest, engines: list[RoutedEngine]) -> list[float]:
    """Return the predicted TTFT of a request on each engine, in ms.

    TTFT = API server time + prefill of the outstanding and of the request's uncached tokens, in scheduler steps that
    also decode the running requests. The router does not see the progress of a prefill: outstanding prefill tokens
    count until their first token. Attention of outstanding prefills is that of a prompt of mean length.
    """
    prompt_tokens, block_tokens = request.prompt_tokens, request.block_tokens
    return [
        predicted_ttft_ms(engine.costs, engine, prompt_tokens, max(1.0, prompt_tokens - engine.overlap * block_tokens))
        for engine in engines
    ]


def predicted_ttft_ms(costs: RoutingCosts, engine: RoutedEngine, prompt_tokens: int, uncached: float) -> float:
    """Return the predicted TTFT of a prompt with ``uncached`` tokens, in ms."""
    outstanding, requests = engine.prefill_tokens, engine.requests
    token_ms, token2_ms = costs.per_prefill_token_ms, costs.per_attention_token2_ms
    ms = costs.frontend_base_ms + prompt_tokens * (
        costs.frontend_ms_per_prompt_token + costs.delivery_ms_per_prompt_token
    )
    ms += uncached * (token_ms + token2_ms * (prompt_tokens - uncached / 2))
    step_ms = costs.t0_ms + costs.prefill_step_ms
    if requests:
        ms += outstanding * (token_ms + token2_ms * engine.in_flight_tokens / requests / 2)
        step_ms += costs.per_decode_ms * requests + costs.per_kv_token_ms * engine.in_flight_tokens
    return ms + ceil((outstanding + uncached) / costs.step_tokens) * step_ms


def earliest_first_token(request: RoutedRequest, engines: list[RoutedEngine]) -> int:
    """Return the index of the engine with the least predicted TTFT; ties: fewest requests."""
    return least_costly(predicted_ttfts_ms(request, engines), request, engines)
