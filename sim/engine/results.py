"""Results of a simulated run as a trace: its header, and a record per request with predicted times."""

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
"""Distance from a half within which a product of up to ``MOST_PARTS`` may be rounded the other way."""
MOST_PARTS = 1e12
AT_ONCE = 1 << 10
"""Requests whose columns become numbers at a time."""


class EngineResults(NamedTuple):
    """Requests that have ended on one engine."""

    requests: list[SimulatedRequest]
    rows: IntArray
    """Their places in the workload's ``Arrivals``."""
    seen_ms: vec[float]
    """When clients see the tokens of each of the engine's steps."""
    upstream: str | None = None
    """Name of the engine in a fleet. None: no engine of the fleet got them."""


class Results(NamedTuple):
    """A workload that has ended."""

    arrivals: Arrivals
    engines: list[EngineResults]
    is_fleet: bool = False

    def requests(self) -> list[SimulatedRequest]:
        """Return all requests, engine by engine."""
        return [request for engine in self.engines for request in engine.requests]


def finished_records(results: Results, block_size: int, *, keep_hashes: bool = True) -> Iterator[Record]:
    """Yield the records in order of their ends, with the requests in flight at each arrival.

    A record is made when it is asked for, so that they are never all in memory.
    """
    arrivals, requests, engines = results.arrivals, results.requests(), results.engines
    engine_of = np.repeat(np.arange(len(engines)), [len(engine.requests) for engine in engines])
    rows = np.concatenate([engine.rows for engine in engines])
    ended = ResultColumns(requests)
    came_ms, e2e_ms = array_of(ended.arrival_ms, np.float64), array_of(ended.e2e_ms, np.float64)
    times_ms = rounded(np.array([came_ms, e2e_ms, ended.ttft_ms, ended.queue_ms]))
    order = np.lexsort((arrivals.numbers[rows], times_ms[0] + np.nan_to_num(times_ms[1])))
    times_ms = np.vstack([times_ms, arrivals.think_ms[rows]])
    in_flight = _in_flight(came_ms, came_ms + np.nan_to_num(e2e_ms))
    texts = [GapTexts(engine.seen_ms) for engine in engines]
    for part in np.array_split(order, len(order) // AT_ONCE + 1):
        columns = [column.tolist() for column in (part, engine_of[part], in_flight[part], *_known(times_ms[:, part]))]
        records = arrivals.records(rows[part])
        for record, index, engine, concurrency, *times in zip(records, *columns, strict=True):
            request = requests[index]
            if not keep_hashes:
                record.block_hashes = record.output_block_hashes = record.hash_source = None
            if results.is_fleet and request.outcome != AS_RECORDED:
                record.upstream = engines[engine].upstream
            record.concurrency = concurrency
            predict(record, request, times, texts[engine], block_size)
            yield record


def _in_flight(came_ms: FloatArray, went_ms: FloatArray) -> IntArray:
    """Return the requests in flight at each arrival, that one included."""
    arrived, gone = (np.searchsorted(np.sort(times), came_ms, side="right") for times in (came_ms, went_ms))
    return np.asarray(np.maximum(1, arrived - gone))


def rounded(times_ms: FloatArray) -> FloatArray:
    """Return times as ``round`` gives them. The product with a power of ten is rounded itself, so that near a half its
    nearest whole number may be another."""
    parts = times_ms * 10**DECIMALS
    nearest = np.rint(parts) / 10**DECIMALS
    unsure = (np.abs(np.abs(parts - np.trunc(parts)) - 0.5) < UNSURE) | (np.abs(parts) > MOST_PARTS)
    nearest[unsure] = [round(time_ms, DECIMALS) for time_ms in times_ms[unsure].tolist()]
    return nearest


def _known(times_ms: FloatArray) -> npt.NDArray[np.object_]:
    """Return times with None for NaN."""
    known = times_ms.astype(np.object_)
    known[np.isnan(times_ms)] = None
    return known


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
    """Header of a predicted trace: all that decided it. ``digest``: of the trace that was simulated."""
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
