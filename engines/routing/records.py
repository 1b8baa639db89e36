"""Inputs of a routing policy: the request, and the load and prefix overlap of each engine.

Filled by the simulated fleet (*fleet*), ``sim serve --engines`` (*serve*) and ``tap --route`` (*tap*).
No field is an engine's internal state: a router counts the requests that it sent and maintains a prefix index.
mypyc compiles this module.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class RoutedRequest(NamedTuple):
    """A request at its routing decision: session, prefix blocks, prompt tokens."""

    number: int
    """Number of earlier routing decisions."""
    arrival_s: float
    """Router's clock. fleet: virtual time of the trace; serve, tap: monotonic time."""
    session: bytes | None
    """Session id. fleet: the record's session id; serve: X-Session-ID or ``user``; tap: X-Session-ID or
    X-Dynamo-Session-ID. None: unknown."""
    blocks: Sequence[int]
    """Chained keys of the prompt's prefix blocks. fleet, serve: hashes of full blocks; tap: hashes of byte blocks in
    the first 16 KiB of the body. Empty: unknown."""
    block_tokens: float
    """Tokens per block. fleet, serve: the block size; tap: an estimate from bytes."""
    prompt_tokens: int
    """Prompt length. fleet, serve: exact; tap: an estimate from Content-Length. 0: unknown."""
    output_tokens: int | None = None
    """Output limit of the request (``max_tokens``). None: unknown."""
    turn: int | None = None
    """Turn of the session, from 1. fleet: of the trace; serve, tap: None, the policy counts turns."""


class RoutingCosts(NamedTuple):
    """Latency model parameters for routing, named as in model.json; absent: 0. Default: 1 ms per prefill token."""

    per_prefill_token_ms: float = 1.0
    per_attention_token2_ms: float = 0.0
    t0_ms: float = 0.0
    prefill_step_ms: float = 0.0
    per_decode_ms: float = 0.0
    per_kv_token_ms: float = 0.0
    frontend_base_ms: float = 0.0
    frontend_ms_per_prompt_token: float = 0.0
    delivery_ms_per_prompt_token: float = 0.0
    step_tokens: float = 8192.0
    """Token budget of a scheduler step (``max_num_batched_tokens``)."""


TOKENS_ALONE = RoutingCosts()
"""Costs without a latency model: only prefill tokens count."""


@dataclass(eq=False)
class RoutedEngine:
    """Router's view of an engine: load, outstanding prefill tokens, prefix overlap. Read-only for policies."""

    index: int
    """Index in the fleet; does not change when other engines leave."""
    name: str
    """Name for the session hash. tap: the upstream's URL; fleet: the record's ``upstream`` or the
    index as text; serve: the index as text."""
    seed: int
    """Seed of the session hash, from ``engine_seed(name)``."""
    capacity_blocks: int = 0
    """KV cache size in blocks. fleet, serve: usable blocks; tap: by the engine's metrics. 0: unknown."""
    costs: RoutingCosts = TOKENS_ALONE
    """Costs. fleet: of the engine's latency model; serve: of the served model.json; tap: of the route's ``model``."""
    healthy: bool = True
    """False: ejected, draining or not started. Policies see unhealthy engines only if no engine is healthy."""
    requests: int = 0
    """Requests in flight, as counted by the router."""
    prefill_tokens: float = 0.0
    """Outstanding prefill: uncached prompt tokens of requests without a first token."""
    in_flight_tokens: float = 0.0
    """Prompt tokens of the requests in flight, cached tokens included."""
    overlap: int = 0
    """Prefix hit of the current request on this engine, in blocks, by the prefix index; 0: none."""


Policy = Callable[[RoutedRequest, list[RoutedEngine]], int]
"""Returns the index in the list of the engine that gets the request. The list is never empty, and holds only
healthy engines, or all engines if none is healthy. Each router creates its policy; a stateful policy implements
``policies.Learner``."""


def uncached_tokens(request: RoutedRequest, engine: RoutedEngine) -> float:
    """Return the prompt tokens to prefill on the engine, by the router's prefix index."""
    return max(0.0, request.prompt_tokens - engine.overlap * request.block_tokens)
