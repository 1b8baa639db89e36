"""Simulation of a workload on one engine: scheduler, KV cache, latency model; results as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from librt.vecs import vec
from mypy_extensions import i64

from measure.cache.vectors import array_of, floats, integers
from sim.engine.apiserver import PLACEMENTS, ApiServer
from sim.engine.columns import RequestColumns, TokenRuns
from sim.engine.deployment import Deployment
from sim.engine.eventheap import push_first_turns
from sim.engine.loop import Engine
from sim.engine.simulatedrequest import SimulatedRequest
from sim.latency.modelfile import Model
from sim.latency.noise import Noise, frontend_factors, normals_table, step_knots, step_table, steps_stream, weights
from sim.latency.stepcost import NUM_ROW_TERMS, StepCost
from sim.latency.stepnoise import StepNoise
from sim.vllm.config import EngineConfig
from sim.vllm.hybridgroups import make_hybrid_cache
from sim.vllm.kvcache import KVCache, SingleGroupCache
from sim.vllm.offloading import Offloading, Tier
from sim.vllm.request import ANY_HITS, Request
from sim.vllm.scheduler import Scheduler
from sim.vllm.segments import SegmentPool
from sim.workload.arrivals import NOBODY, Arrivals
from tracefile.compiled import warn_if_plain
from tracefile.records.arrays import BoolArray, FloatArray, IntArray

MANY = 1_000
"""Requests from which on an uncompiled run takes seconds."""


def request_columns(arrivals: Arrivals, block_size: int, hit_limits: IntArray | None = None) -> RequestColumns:
    """Return the request columns of a workload. ``hit_limits``: limit of each prefix hit, in blocks; None: no hit of
    prompts with log probabilities, else no limit. Raises ValueError for a chain that is too short for its tokens."""
    if hit_limits is None:
        hit_limits = np.where(arrivals.prompt_logprobs > 0, 0, ANY_HITS)
    computed = arrivals.prompt_tokens + arrivals.output_tokens - 1
    for index in np.flatnonzero(arrivals.runs & (arrivals.full_blocks < computed // block_size))[:1].tolist():
        raise ValueError(f"request {arrivals.ids[index]}: its chain of {arrivals.full_blocks[index]} keys is too short")
    has_parent = arrivals.parents != NOBODY
    parents = np.where(has_parent, np.searchsorted(arrivals.numbers, arrivals.parents), NOBODY)
    return RequestColumns(
        arrivals.ids,
        integers(arrivals.hashes),
        (
            integers(arrivals.prompt_tokens),
            integers(arrivals.output_tokens),
            integers(np.cumsum(arrivals.hashed_blocks) - arrivals.hashed_blocks),
            integers(np.minimum(arrivals.hashed_blocks, computed // block_size)),
            integers(hit_limits),
            integers(~arrivals.runs),
            integers(parents),
        ),
        (
            floats(arrivals.arrival_ms),
            floats(np.nan_to_num(arrivals.think_ms)),
            floats(arrivals.abort_after_ms),
            floats(arrivals.recorded_e2e_ms),
        ),
    )


def servable(arrivals: Arrivals, config: EngineConfig) -> BoolArray:
    """Return for each request whether the engine's scheduler accepts it."""
    scheduler, tokens = make_scheduler(config), arrivals.prompt_tokens + arrivals.output_tokens
    lengths, length_of = np.unique(np.maximum(tokens, 2), return_inverse=True)
    accepts = [scheduler.accepts(Request("", length - 1, 1, vec[i64]())) for length in lengths.tolist()]
    return np.asarray(arrivals.runs & np.array(accepts, bool)[length_of])


def step_noise(noise: Noise, seed: int | None) -> StepNoise:
    """Return the noise factors of a run's scheduler steps; ``seed`` None: medians."""
    key = None if seed is None else int(np.array([steps_stream(seed)], np.uint64).view(np.int64)[0])
    table = step_table(noise)
    return StepNoise(
        knots=floats(step_knots(noise)),
        table=floats(table.ravel()),
        normals=floats(normals_table()),
        key=key,
        weights=weights(noise),
        correlation_ms=noise.correlation_time_ms,
    )


def make_scheduler(
    config: EngineConfig, deployment: Deployment | None = None, cache: KVCache | None = None
) -> Scheduler:
    """Return an engine's scheduler with an empty KV cache, and with offloading to host memory if ``deployment`` has it.

    ``cache``: KV cache to use instead.
    """
    if cache is None and config.kv_groups is not None:
        cache = make_hybrid_cache(config)
    elif cache is None:
        pool = SegmentPool(config.num_gpu_blocks, config.enable_prefix_caching)
        cache = SingleGroupCache(pool, config.block_size)
    offloading = None
    if deployment is not None and deployment.host_blocks and isinstance(cache, SingleGroupCache):
        host_ms = deployment.kv_bytes_per_token / deployment.host_gb_per_s / 1e6
        offloading = Offloading(cache, Tier(deployment.host_blocks, host_ms, deployment.host_latency_ms))
    return Scheduler(
        cache,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_tokens=config.longest_request,
        caching=config.enable_prefix_caching,
        offloading=offloading,
    )


def make_engine(
    config: EngineConfig,
    model: Model,
    seed: int | None,
    *,
    deployment: Deployment | None = None,
    cache: KVCache | None = None,
    now_ms: float = 0.0,
    keeps_rows: bool = False,
) -> Engine:
    """Return an engine before its first request: scheduler, latency model, API server."""
    cost = StepCost(list(model.costs))
    return Engine(
        make_scheduler(config, deployment, cache),
        cost,
        step_noise(model.noise, seed),
        ApiServer(cost, PLACEMENTS.index(model.frontend_placement)),
        composes_ahead=config.async_scheduling,
        now_ms=now_ms,
        keeps_rows=keeps_rows,
    )


def rows_of(engine: Engine) -> FloatArray:
    """Return the term counts of each scheduler step, shape (steps, terms), of an engine with ``keeps_rows``."""
    return array_of(engine.rows, np.float64).reshape(-1, NUM_ROW_TERMS)


def delivered_ms_of(engine: Engine) -> FloatArray:
    """Return the delivery time of each step's tokens, in ms."""
    return array_of(engine.delivered_ms, np.float64)


def thinned_gaps(parts: Sequence[tuple[list[SimulatedRequest], FloatArray]], most: int) -> FloatArray:
    """Return the gaps between tokens (ITL) of all requests, in ms; every n-th gap if there are more than ``most``.

    ``parts``: by engine, its requests and the delivery time of each step's tokens.
    """
    runs = [TokenRuns(requests) for requests, _ in parts]
    gaps = [np.maximum(array_of(run.num_delivered, np.int64) - 1, 0) for run in runs]
    stride, before, thinned = -(-sum(int(num_gaps.sum()) for num_gaps in gaps) // most) or 1, 0, [np.empty(0)]
    for run, num_gaps, (_, delivered_ms) in zip(runs, gaps, parts, strict=True):
        positions = np.arange(-before % stride, num_gaps.sum(), stride)
        before += int(num_gaps.sum())
        # A request has one token more than gaps.
        streamed = num_gaps[array_of(run.num_delivered, np.int64) > 0]
        tokens = positions + np.searchsorted(np.cumsum(streamed), positions, side="right")
        firsts, counts = array_of(run.runs, np.int64).reshape(-1, 2).T
        ends = np.cumsum(counts)
        run_of = np.searchsorted(ends, [tokens, tokens + 1], side="right")
        steps = [tokens, tokens + 1] + (firsts - ends + counts)[run_of]
        thinned.append(delivered_ms[steps[1]] - delivered_ms[steps[0]])
    return np.concatenate(thinned)


@dataclass(frozen=True, slots=True)
class Simulation:
    """Run of a workload on one engine."""

    engine: Engine
    requests: list[SimulatedRequest]

    @property
    def rows(self) -> FloatArray:
        """Term counts of each scheduler step, of an engine with ``keeps_rows``."""
        return rows_of(self.engine)

    @property
    def delivered_ms(self) -> FloatArray:
        """Delivery time of each step's tokens, in ms."""
        return delivered_ms_of(self.engine)


def simulate(
    arrivals: Arrivals,
    config: EngineConfig,
    model: Model,
    seed: int | None = None,
    *,
    columns: RequestColumns | None = None,
    deployment: Deployment | None = None,
    cache: KVCache | None = None,
    keeps_rows: bool = False,
) -> Simulation:
    """Run a workload on one engine until all requests have ended. ``columns``: request columns of ``arrivals``."""
    if len(arrivals) > MANY:
        warn_if_plain()
    columns = columns or request_columns(arrivals, config.block_size)
    requests = columns.make(floats(frontend_factors(model.noise, seed, arrivals.ids)))
    start_ms = min(float(arrivals.arrival_ms.min(initial=0.0)), 0.0)
    engine = make_engine(
        config, model, seed, deployment=deployment, cache=cache, now_ms=start_ms, keeps_rows=keeps_rows
    )
    push_first_turns(engine.arrivals, requests)
    engine.run()
    return Simulation(engine, requests)
