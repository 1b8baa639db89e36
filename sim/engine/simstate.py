"""A workload laid out for the compiled engine: ``SimState`` before its first arrival.

``build_state`` lays out a whole workload, ``lay_out`` an engine's part of a fleet's.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from measure.cache.chains import chain_places
from sim.engine.deployment import Deployment
from sim.engine.tiers import lay_out_tier
from sim.kernels import layout, loop
from sim.kernels.groups import group_pool
from sim.kernels.layout import NONE, Draws, Pool, Records, Scheduler, SimState, Timeline
from sim.kernels.pool import empty_pool
from sim.latency.modelfile import Model
from sim.latency.noise import normals_table, steps_stream, weights
from sim.latency.terms import NUM_ROW_TERMS, NUM_STEP_TERMS, FrontendPlacement
from sim.vllm.config import EngineConfig
from sim.vllm.hybrid import cache_of
from sim.vllm.pool import BlockPool
from sim.workload.arrivals import NOBODY, Arrivals
from tracefile.records.arrays import BoolArray, IntArray, UInt64Array

FIRST_STEPS = 1 << 18
"""Steps in a timeline at first; it doubles when it is full."""
_COPIED = sorted({*(layout.REQUEST.names or ())} & {*Arrivals.__dataclass_fields__} - {"arrival_ms"})
"""Columns of the arrivals that the scheduler's requests have as they are."""
MOST_SLOTS = 1 << 16
"""Slots at most of the table that finds segments; a slot may lead to several."""


def build_state(
    arrivals: Arrivals,
    config: EngineConfig,
    model: Model,
    seed: int | None = None,
    *,
    first_steps: int = FIRST_STEPS,
    deployment: Deployment | None = None,
) -> SimState:
    room = int(arrivals.output_tokens.sum())
    return lay_out(arrivals, config, model, seed, first_steps=first_steps, token_room=room, deployment=deployment)


def lay_out(
    arrivals: Arrivals,
    config: EngineConfig,
    model: Model,
    seed: int | None,
    *,
    first_steps: int,
    token_room: int,
    deployment: Deployment | None = None,
) -> SimState:
    """Lay out one of several parts of a workload; ``token_room``: tokens that its arenas hold."""
    settings = _settings(config, model.frontend_placement)
    requests, blocks = _requests(arrivals, config)
    keys = _lay_out_keys(arrivals, requests, config.block_size, blocks)
    runs = lay_out_runs(arrivals)
    roots = np.flatnonzero(arrivals.parents == NOBODY)
    tier = lay_out_tier(len(arrivals), deployment, config.block_size)
    width = NUM_ROW_TERMS if model.frontend_placement == "shared_core" else NUM_STEP_TERMS
    most_running = min(config.max_num_seqs, len(arrivals)) + 1
    most_holding = len(arrivals) if tier.state["is_on"][0] else most_running  # max_num_seqs bounds no loading requests
    clock = np.zeros(1, layout.CLOCK)
    clock["composed"] = clock["running"] = NONE
    clock["frontend_free_ms"], clock["num_arrivals"] = -np.inf, len(roots)
    clock["now_ms"] = min(arrivals.arrival_ms.min(initial=0.0), 0.0)
    clock["horizon_ms"] = np.inf
    clock["slow_at_ms"] = clock["seen_ms"] = clock["step_end_ms"] = -np.inf
    clock["slowest_factor"] = np.exp(model.noise.step_table().max(initial=0.0))
    return SimState(
        scheduler=Scheduler(
            settings=settings,
            pool=_pool(config, settings, keys, np.sort(blocks)[-most_holding:]),
            tier=tier,
            requests=requests,
            running=np.zeros(most_running, np.int64),
            shares=np.zeros((2, most_running), layout.SHARE),
            steps=np.zeros(2, layout.STEP),
            state=np.zeros(1, layout.SCHEDULE),
            stats=np.zeros(1, layout.PREFIX_STATS),
            finished=np.zeros(most_running, np.int64),
            due=np.zeros(config.block_size, np.int64),
            also_due=np.zeros(most_running, np.int64),
        ),
        costs=np.array(model.costs),
        clock=clock,
        runs=runs,
        arrivals=arrival_heap(runs, roots),
        events=np.zeros((3 if tier.state["is_on"][0] else 2) * len(arrivals) + 1, layout.EVENT),
        jobs=np.zeros(len(arrivals) + 1, np.int64),
        done=np.zeros(len(arrivals) + 1, layout.EVENT),
        draws=_draws(arrivals.ids, model, seed),
        timeline=Timeline(
            np.empty(first_steps), np.empty(first_steps), np.empty((first_steps, width)), np.empty(first_steps)
        ),
        token_steps=np.zeros(token_room, np.int32),
        itl_ms=np.zeros(token_room),
    )


def with_model(state: SimState, arrivals: Arrivals, model: Model, seed: int | None) -> SimState:
    """Copy ``state``, laid out and not yet run, for another model and seed; the API server's placement stays."""
    own = cast(SimState, _copied(state))
    return own._replace(costs=np.array(model.costs), draws=_draws(arrivals.ids, model, seed))


def _copied(part: Any) -> Any:
    return type(part)(*map(_copied, part)) if isinstance(part, tuple) else part.copy()


def _draws(ids: Sequence[str], model: Model, seed: int | None) -> Draws:
    noise = model.noise
    return Draws(
        step_key=np.array([] if seed is None else [steps_stream(seed)], np.uint64),
        step_knots=noise.step_knots(),
        step_table=noise.step_table(),
        normals=normals_table(),
        weights=np.array([*weights(noise), noise.correlation_time_ms]),
        frontend=noise.frontend_factors(seed, ids),
    )


def _settings(config: EngineConfig, placement: FrontendPlacement) -> Records:
    values = {
        "composes_ahead": config.async_scheduling,
        "placement": layout.PLACEMENTS.index(placement),
        "max_tokens": config.longest_request,
        "pauses": False,
    }
    record = np.zeros(1, layout.SETTINGS)
    for name in layout.SETTINGS.names or ():
        record[name] = values[name] if name in values else getattr(config, name)
    return record


def _pool(config: EngineConfig, settings: Records, keys: UInt64Array, most_held: IntArray) -> Pool:
    """Lay out an empty pool. Arrays have a record per block, the most ever needed; unused parts take no memory.

    ``most_held``: blocks of the requests with the most, as many as may hold some at once.
    """
    if config.kv_groups is not None:
        longest = int(most_held.max(initial=0) + 1) * config.block_size
        return cast(Pool, group_pool(config, settings, keys, rows=len(most_held), longest=longest))
    usable, most_holds = config.usable_blocks, int(most_held.sum())
    slots = 1 << min(len(keys) + most_holds, usable, MOST_SLOTS).bit_length()
    return empty_pool(settings, usable, keys, records=usable, holds=most_holds, slots=slots)


def loop_of(config: EngineConfig) -> Callable[[SimState], int]:
    """Return the step loop for an engine's KV groups, which compiles when it is first called."""
    if config.kv_groups is None:
        return loop.run_as_needed
    from sim.kernels.groupsteps import run  # noqa: PLC0415 - made of all kernels, and most engines have one group

    return run


def _requests(arrivals: Arrivals, config: EngineConfig) -> tuple[Records, IntArray]:
    """Lay out the scheduler's requests, one more at the end, and count their blocks; 0: a request cannot be served."""
    requests = np.zeros(len(arrivals) + 1, layout.REQUEST)
    for name in _COPIED:
        requests[name][:-1] = getattr(arrivals, name)
    requests["last_token"][:-1] = arrivals.prompt_tokens + arrivals.output_tokens
    requests["num_tokens"] = requests["prompt_tokens"]
    requests["cached_tokens"] = -1
    requests["serial"][:-1] = arrivals.numbers
    requests["state"] = layout.ABSENT
    requests["next_waiting"] = requests["previous_waiting"] = len(arrivals)
    computed = requests["last_token"][:-1] - 1
    return requests, np.where(servable(arrivals, config), -(-computed // config.block_size), 0)


def servable(arrivals: Arrivals, config: EngineConfig) -> BoolArray:
    """Return for each request if an engine can ever serve it."""
    tokens = arrivals.prompt_tokens + arrivals.output_tokens - 1
    runs = arrivals.runs & (tokens < config.longest_request)
    if config.kv_groups is None:
        return np.asarray(runs & (tokens <= config.usable_blocks * config.block_size))
    cache = cache_of(config, BlockPool(2, config.block_size, enable_prefix_caching=config.enable_prefix_caching))
    lengths, length_of = np.unique(tokens, return_inverse=True)
    fits = np.array([cache.most_blocks(length) <= config.usable_blocks for length in lengths.tolist()], bool)
    return np.asarray(runs & fits[length_of])


def _lay_out_keys(arrivals: Arrivals, requests: Records, block_size: int, blocks: IntArray) -> UInt64Array:
    """Lay out the known keys of the requests that can be served, up to their last full block."""
    full = np.where(blocks > 0, (requests["last_token"][:-1] - 1) // block_size, 0)
    for place in np.flatnonzero(arrivals.full_blocks < full)[:1].tolist():
        raise ValueError(f"request {arrivals.ids[place]}: its chain of {arrivals.full_blocks[place]} keys is too short")
    counts = np.minimum(arrivals.known, full)
    requests["known_keys"][:-1] = counts
    requests["first_key"][:-1] = np.cumsum(counts) - counts
    if counts.sum() == len(arrivals.hashes):
        return arrivals.hashes
    return arrivals.hashes[chain_places(np.cumsum(arrivals.known) - arrivals.known, counts)]


def lay_out_runs(arrivals: Arrivals) -> Records:
    """Lay out the runs of requests that have not come yet; children are linked to their parents."""
    runs = np.zeros(len(arrivals), layout.REQUEST_RUN)
    for name in ("entry_ms", "admitted_ms", "ttft_ms", "e2e_ms"):
        runs[name] = np.nan
    runs["arrival_ms"] = arrivals.arrival_ms
    runs["think_ms"] = np.nan_to_num(arrivals.think_ms)
    runs["abort_after_ms"] = arrivals.abort_after_ms
    runs["recorded_e2e_ms"] = arrivals.recorded_e2e_ms
    runs["as_recorded"] = ~arrivals.runs
    runs["next_think_ms"] = np.inf
    runs["first_token"] = NONE
    runs["parent"] = runs["first_child"] = runs["next_child"] = -1
    children = np.flatnonzero(arrivals.parents != NOBODY)
    parents = np.searchsorted(arrivals.numbers, arrivals.parents[children])
    for place, parent in zip(children[::-1].tolist(), parents[::-1].tolist(), strict=True):
        runs["next_child"][place] = runs["first_child"][parent]
        runs["first_child"][parent] = place
        runs["parent"][place] = parent
    return runs


def arrival_heap(runs: Records, places: IntArray) -> Records:
    """Lay out a heap of the arrivals at ``places``; sorted events are a heap."""
    heap = np.zeros(len(runs) + 1, layout.EVENT)
    times_ms = runs["arrival_ms"][places]
    order = np.argsort(times_ms, kind="stable")
    heap["time_ms"][: len(places)] = times_ms[order]
    heap["code"][: len(places)] = places[order]
    return heap
