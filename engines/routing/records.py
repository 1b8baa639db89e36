"""A request and an engine as a router may see them, and the type of a policy.

Three users fill them: the simulated fleet (*fleet*), ``sim serve --engines`` (*serve*) and ``tap --route`` (*tap*).
Nothing here is an engine's inside: a router counts the requests that it sent and keeps an index of its own.
mypyc compiles this module.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class RoutedRequest(NamedTuple):
    """A request when the router chooses its engine."""

    number: int
    """Requests that the router chose an engine for before."""
    arrival_s: float
    """Router's clock. fleet: virtual time of the trace; serve, tap: monotonic time."""
    session: bytes | None
    """Key of its conversation, as in the header. fleet: the record's session id; serve: X-Session-ID or ``user``;
    tap: X-Session-ID or X-Dynamo-Session-ID. None: not told."""
    blocks: Sequence[int]
    """Keys of its prompt from the start, each key depending on all before it. fleet, serve: hashes of full blocks;
    tap: hashes of byte prefixes, as far as the head of the body was read. Empty: not known."""
    block_tokens: float
    """Tokens that each key stands for. fleet, serve: the block size; tap: an estimate from bytes."""
    prompt_tokens: int
    """fleet, serve: exact; tap: an estimate from Content-Length. 0: not known."""
    output_tokens: int | None = None
    """Most tokens asked for (``max_tokens``). None: not told."""
    turn: int | None = None
    """Turn of its session from 1 on. fleet: of the trace; serve, tap: None, the router counts the turns it saw."""


class RoutingCosts(NamedTuple):
    """An engine's few numbers of a latency model; fields as in model.json, absent ones 0. Default: a ms a token."""

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
"""Costs without a latency model: tokens to prefill count, and nothing else."""


@dataclass(eq=False)
class RoutedEngine:
    """An engine as the router sees it. The router keeps it up to date; a policy only reads it."""

    place: int
    """Place in the fleet. Stays the engine's own when others leave."""
    name: str
    """Name that its share of the sessions hangs on. tap: the upstream's URL; fleet: the record's ``upstream`` or the
    place as a word; serve: the place as a word."""
    seed: int
    """Seed of its hashes, from ``engine_seed(name)``."""
    capacity_blocks: int = 0
    """KV cache in blocks of the request's keys. fleet, serve: usable blocks; tap: of its metrics. 0: not known."""
    costs: RoutingCosts = TOKENS_ALONE
    """fleet: of its latency model; serve: of the served model.json; tap: of the route's ``model``."""
    healthy: bool = True
    """False: ejected by health checks, draining or not started. Policies see it only where no engine is healthy."""
    requests: int = 0
    """Requests sent and not ended, by the router's own count."""
    prefill_tokens: float = 0.0
    """Prompt tokens sent and not yet followed by a first token, less those that the index said were cached."""
    held_tokens: float = 0.0
    """Prompt tokens of the requests sent and not ended, cached ones included."""
    overlap: int = 0
    """Leading keys of the request in hand that the engine holds, by the router's knowledge of caches; 0: none known."""


Policy = Callable[[RoutedRequest, list[RoutedEngine]], int]
"""Returns the place in the list of the engine that gets the request. The list is never empty, and holds only
healthy engines unless there is none. A policy that keeps a state is made anew for each router; one that learns has the
methods of ``policies.Learner``, too."""


def uncached_tokens(request: RoutedRequest, engine: RoutedEngine) -> float:
    """Return prompt tokens that the engine would have to compute, by the router's knowledge of its cache."""
    return max(0.0, request.prompt_tokens - engine.overlap * request.block_tokens)
