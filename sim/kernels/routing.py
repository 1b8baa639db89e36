"""Policies of ``engines.routing`` that need counts and prefixes alone, compiled with the router's account.

The blocks that the router's index takes an engine to hold are a block pool, which evicts what was used longest ago.
"""

from typing import Any, NamedTuple

import numpy as np

from engines.routing.costs import predicted_ttft_ms
from engines.routing.prefix import IMBALANCE_RATIO, IMBALANCE_REQUESTS, LEAST_MATCH
from engines.routing.records import RoutingCosts
from measure.machinecode.kernels import kernel
from sim.kernels import layout
from sim.kernels.addresses import ENGINE_STATE, POOL, reader, shape_of
from sim.kernels.layout import NONE, Places, Pool, Records, record
from sim.kernels.pool import hold, lookup, publish, release, take
from sim.vllm import rules

ASKED, TABLE, ROUND_ROBIN, LEAST_LOADED, PREFIX, COST = range(6)
"""Policies. ASKED: Python chooses; TABLE: an engine for each place is known before."""
NOTHING, INDEX, CACHES = range(3)
"""Knowledge of the engines' caches."""
FIRST_TOKEN, END = range(2)
"""Kinds of what a router is told of a request."""
ROUTER = record("policy knowledge block_tokens num_sent num_indexed", times="lag_s")
"""``num_indexed``: requests sent that the index has taken in."""
ROUTED_ENGINE = record(
    "requests overlap",
    times=" ".join(("prefill_tokens held_tokens cost", *RoutingCosts.__struct_fields__)),
)
"""Fields as of ``RoutedEngine`` and of its costs; ``cost``: by which the policy compares it for the request in hand."""
SENT = record("engine place", times="prefill_tokens at_s")
"""By place: engine and prefill outstanding. By number of the request sent: its place and when it was sent."""


class Router(NamedTuple):
    """A compiled router's state but its pools."""

    settings: Records
    engines: Records
    sent: Records
    requests: Records
    """REQUEST by place; one more, to use the index."""
    table: Places
    """Engine by place, for TABLE."""


ROUTER_STATE = shape_of(
    Router,
    settings=ROUTER,
    engines=ROUTED_ENGINE,
    sent=SENT,
    requests=layout.REQUEST,
    table=np.dtype(np.int64),
)
_engine_at, _pool_at = reader(ENGINE_STATE), reader(POOL)
_lookup_limit = kernel(rules.lookup_limit)
_predicted_ttft_ms = kernel(predicted_ttft_ms)


@kernel
def send(router: Router, addresses: Places, place: int, now_ms: float) -> int:
    """Return the engine of the request at ``place``, which has just come, and count it there.

    ``addresses``: of the engines' states, then of the index's pools.
    """
    settings, sent = router.settings[0], router.sent
    if settings.knowledge == INDEX:
        _index_until(router, addresses, now_ms / 1e3)
    number = _choose(router, addresses, place)
    engine, request = router.engines[number], router.requests[place]
    sent[place].engine, sent[settings.num_sent].place = number, place
    sent[settings.num_sent].at_s = now_ms / 1e3
    sent[place].prefill_tokens = max(0.0, request.prompt_tokens - engine.overlap * settings.block_tokens)
    settings.num_sent += 1
    engine.requests += 1
    engine.prefill_tokens += sent[place].prefill_tokens
    engine.held_tokens += request.prompt_tokens
    if settings.knowledge == INDEX and settings.lag_s == 0.0:
        _index_until(router, addresses, now_ms / 1e3)
    return int(number)


@kernel
def hear(router: Router, told: Records, count: int) -> None:
    """Learn of first tokens and ends, in order."""
    for event in range(count):
        place, kind = told[event].code >> 1, told[event].code & 1
        sent = router.sent[place]
        if sent.engine == NONE:
            continue
        engine = router.engines[sent.engine]
        engine.prefill_tokens -= sent.prefill_tokens
        sent.prefill_tokens = 0.0
        if kind == FIRST_TOKEN:
            continue
        engine.requests -= 1
        engine.held_tokens -= router.requests[place].prompt_tokens
        if engine.requests == 0:
            engine.prefill_tokens = engine.held_tokens = 0.0


@kernel
def _choose(router: Router, addresses: Places, place: int) -> int:
    settings, engines = router.settings[0], router.engines
    if settings.policy == TABLE:
        return int(router.table[place])
    if settings.policy == ROUND_ROBIN:
        return int(settings.num_sent % len(engines))
    for number in range(len(engines)):
        _see(router, addresses, place, number)
    if settings.policy == PREFIX:
        holder = _longest_prefix(engines, router.requests[place].known_keys)
        if holder != NONE:
            return holder
    return _least_costly(engines, settings.num_sent)


@kernel
def _see(router: Router, addresses: Places, place: int, number: int) -> None:
    """Look at an engine for a request: its overlap and its cost."""
    settings, engine, request = router.settings[0], router.engines[number], router.requests[place]
    if settings.knowledge == CACHES:
        scheduler = _engine_at(addresses, number).scheduler
        own = scheduler.requests[place]
        most = _lookup_limit(own.prompt_tokens, settings.block_tokens, own.prompt_logprobs)
        engine.overlap, _ = lookup(scheduler.pool, own, most)
    elif settings.knowledge == INDEX:
        pool = _pool_at(addresses, len(router.engines) + number)
        engine.overlap, _ = lookup(pool, request, request.known_keys)
    uncached = max(0.0, request.prompt_tokens - engine.overlap * settings.block_tokens)
    if settings.policy == COST:
        engine.cost = _predicted_ttft_ms(engine, engine, request.prompt_tokens, max(1.0, uncached))


@kernel
def _longest_prefix(engines: Records, blocks: int) -> int:
    """Return the engine that ``engines.routing.prefix.longest_prefix`` takes for its prefix; NONE: load decides."""
    most, least, best = engines[0].requests, engines[0].requests, 0
    for engine in engines:
        most, least = max(most, engine.requests), min(least, engine.requests)
        best = max(best, engine.overlap)
    if most - least > IMBALANCE_REQUESTS and most > IMBALANCE_RATIO * least:
        return NONE
    if best < max(1.0, LEAST_MATCH * blocks):
        return NONE
    found = NONE
    for number in range(len(engines)):
        if engines[number].overlap == best and (found == NONE or engines[number].requests < engines[found].requests):
            found = number
    return found


@kernel
def _least_costly(engines: Records, turn: int) -> int:
    """Return the engine that ``engines.routing.load.least_costly`` takes: of equals the least loaded, then in turn."""
    best, equals = engines[0], 0
    for engine in engines:
        order = _compare(engine, best)
        if order < 0:
            best, equals = engine, 0
        equals += order <= 0
    turn %= equals
    for number in range(len(engines)):
        if _compare(engines[number], best) == 0:
            if turn == 0:
                return number
            turn -= 1
    return NONE


@kernel
def _compare(one: Any, other: Any) -> int:
    """Return −1 if the first engine is less costly or, of equals, less loaded; 0 if both are equal; else 1."""
    if one.cost != other.cost:
        return -1 if one.cost < other.cost else 1
    if one.requests != other.requests:
        return -1 if one.requests < other.requests else 1
    if one.prefill_tokens != other.prefill_tokens:
        return -1 if one.prefill_tokens < other.prefill_tokens else 1
    return 0


@kernel
def _fill(pool: Pool, request: Any) -> None:
    """Let a request hold its blocks, of so many as the pool has, and find them from then on."""
    count = min(request.known_keys, pool.settings[0].usable_blocks)
    request.num_blocks = count
    if count > 0:
        held = hold(pool, request, count)
        take(pool, count - held)
        publish(pool, request, held, count)


@kernel
def _index_until(router: Router, addresses: Places, now_s: float) -> None:
    """Use the blocks of requests sent a lag ago or earlier, as ``PrefixIndex`` does: the last used stay."""
    settings, sent, scratch = router.settings[0], router.sent, router.requests[len(router.requests) - 1]
    while settings.num_indexed < settings.num_sent and sent[settings.num_indexed].at_s + settings.lag_s <= now_s:
        place = sent[settings.num_indexed].place
        pool = _pool_at(addresses, len(router.engines) + sent[place].engine)
        scratch.first_key, scratch.known_keys = router.requests[place].first_key, router.requests[place].known_keys
        _fill(pool, scratch)
        release(pool, scratch)
        settings.num_indexed += 1
