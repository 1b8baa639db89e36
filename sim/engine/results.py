"""Results of a simulated run as a trace: the header, and a record per request with predicted latencies."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from librt.vecs import vec

from measure.cache.vectors import array_of
from sim.engine.columns import ResultColumns
from sim.engine.gap_json import DECIMALS, GapTexts
from sim.engine.predicted_records import predict
from sim.engine.simulatedrequest import (
    AS_RECORDED,
    SimulatedRequest,
)
from sim.latency.modelfile import Model, model_digest
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import Arrivals
from tracefile.commandline.parser import VERSION
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.schema import Engine as EngineInfo
from tracefile.records.schema import Meta, Record, Workload

UNSURE = 1e-3
"""Distance from a half within which a product of up to ``MOST_PARTS`` may be rounded to the other side."""
MOST_PARTS = 1e12
AT_ONCE = 1 << 10
"""Records built at a time."""


class EngineResults(NamedTuple):
    """Ended requests of one engine, and the delivery times of its tokens."""

    requests: list[SimulatedRequest]
    rows: IntArray
    """Row of each request in the workload's ``Arrivals``."""
    delivered_ms: vec[float]
    """Times at which clients receive the tokens of each of the engine's steps."""
    upstream: str | None = None
    """Name of the engine in a fleet. None: no engine of the fleet served these requests."""


class Results(NamedTuple):
    """Ended requests of a workload, by engine."""

    arrivals: Arrivals
    engines: list[EngineResults]
    is_fleet: bool = False

    def requests(self) -> list[SimulatedRequest]:
        """All requests, engine by engine."""
        return [request for engine in self.engines for request in engine.requests]


def finished_records(results: Results, block_size: int, *, keep_hashes: bool = True) -> Iterator[Record]:
    """Yield predicted records in order of their ends: latencies, cached tokens, requests in flight at each arrival.

    Records are built lazily, so that they are never all in memory.
    """
    arrivals, requests, engines = results.arrivals, results.requests(), results.engines
    engine_of = np.repeat(np.arange(len(engines)), [len(engine.requests) for engine in engines])
    rows = np.concatenate([engine.rows for engine in engines])
    ended = ResultColumns(requests)
    arrival_ms, e2e_ms = array_of(ended.arrival_ms, np.float64), array_of(ended.e2e_ms, np.float64)
    times_ms = rounded(np.array([arrival_ms, e2e_ms, ended.ttft_ms, ended.queue_ms]))
    order = np.lexsort((arrivals.numbers[rows], times_ms[0] + np.nan_to_num(times_ms[1])))
    times_ms = np.vstack([times_ms, arrivals.think_ms[rows]])
    in_flight = _in_flight(arrival_ms, arrival_ms + np.nan_to_num(e2e_ms))
    texts = [GapTexts(engine.delivered_ms) for engine in engines]
    for ends in np.array_split(order, len(order) // AT_ONCE + 1):
        columns = [column.tolist() for column in (ends, engine_of[ends], in_flight[ends], *_or_none(times_ms[:, ends]))]
        records = arrivals.records(rows[ends])
        for record, index, engine, concurrency, *times in zip(records, *columns, strict=True):
            request = requests[index]
            if not keep_hashes:
                record.block_hashes = record.output_block_hashes = record.hash_source = None
            if results.is_fleet and request.outcome != AS_RECORDED:
                record.upstream = engines[engine].upstream
            record.concurrency = concurrency
            predict(record, request, times, texts[engine], block_size)
            yield record


def _in_flight(arrival_ms: FloatArray, end_ms: FloatArray) -> IntArray:
    """Return the requests in flight at each arrival, including the request that arrives."""
    arrived, gone = (np.searchsorted(np.sort(times), arrival_ms, side="right") for times in (arrival_ms, end_ms))
    return np.asarray(np.maximum(1, arrived - gone))


def rounded(times_ms: FloatArray) -> FloatArray:
    """Return times rounded exactly as by ``round``. The product with a power of ten is itself rounded, so that near a
    half the nearest integer may differ: these times go through ``round``."""
    parts = times_ms * 10**DECIMALS
    nearest = np.rint(parts) / 10**DECIMALS
    unsure = (np.abs(np.abs(parts - np.trunc(parts)) - 0.5) < UNSURE) | (np.abs(parts) > MOST_PARTS)
    nearest[unsure] = [round(time_ms, DECIMALS) for time_ms in times_ms[unsure].tolist()]
    return nearest


def _or_none(times_ms: FloatArray) -> npt.NDArray[np.object_]:
    values = times_ms.astype(np.object_)
    values[np.isnan(times_ms)] = None
    return values


def predicted_meta(
    meta: Meta,
    model: Model,
    engine: EngineConfig,
    digest: str,
    *,
    replay_sessions: bool,
    cold_prompts: bool,
    seed: int | None,
) -> Meta:
    """Return the header of a predicted trace: model, scheduler and KV cache settings, seed. ``digest``: of the
    simulated trace."""
    return msgspec.structs.replace(
        meta,
        source="sim",
        model=meta.model or model.model_name,
        engine=EngineInfo(
            name="kvtape-sim",
            version=VERSION,
            block_size=engine.block_size,
            num_gpu_blocks=engine.num_gpu_blocks,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
            enable_prefix_caching=engine.enable_prefix_caching,
            async_scheduling=engine.async_scheduling,
        ),
        workload=Workload(
            pattern="replay-sessions" if replay_sessions else "replay",
            seed=seed,
            cold_prompts=cold_prompts or None,
            source_digest=digest,
        ),
        extra={"model_digest": model_digest(model), "fit_digests": model.fit_digests, "settings": asdict(engine)},
    )
