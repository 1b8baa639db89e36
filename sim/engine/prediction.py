"""A simulated run as a trace: the same requests under the same ids, with predicted times and cached tokens."""

import importlib.metadata
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sim.engine.engine import Simulation
from sim.engine.results import DECIMALS, Ending, ending_of
from sim.latency.modelfile import Model, model_digest
from sim.vllm.config import EngineConfig
from sim.workload.interning import Int64Array
from tracefile.records.schema import Engine as EngineInfo
from tracefile.records.schema import Meta, Record, Workload

Floats = npt.NDArray[np.float64]

_NOTHING: Floats = np.empty(0)
_FAILURES = {"unservable": "exceeds_engine", "parent_failed": "parent_failed"}


def predicted_records(simulation: Simulation, *, keep_hashes: bool = True) -> list[Record]:
    """One record per flight, in order of their ends. ``concurrency`` is counted anew from the predicted times."""
    order = FinishOrder()
    for number, flight in enumerate(simulation.flights):
        if flight.outcome is not None:
            order.add(ending_of(flight, number), simulation.block_size, keep_hashes=keep_hashes)
    return order.release()


class FinishOrder:
    """Puts records in the order of their ends, as they become certain, and counts who was in flight at each arrival."""

    def __init__(self) -> None:
        self._held: list[tuple[float, int, float, Record]] = []
        """End, number and exact arrival of records that are not released."""
        self._came: list[float] = []
        self._went: list[float] = []
        """Exact arrivals and ends of those added since the last release."""
        self._arrivals_ms = self._ends_ms = np.empty(0)
        """Of those before, as far as they come after the arrival of one yet to be released; and of how many more."""
        self._earlier_arrivals = self._earlier_ends = 0

    def __len__(self) -> int:
        """Records that are held."""
        return len(self._held)

    def add(self, ending: Ending, block_size: int, *, keep_hashes: bool = True) -> None:
        """Take an ending, in any order."""
        record = _predicted(ending, block_size, keep_hashes=keep_hashes)
        end_ms = record.end_ms() or record.arrival_ms or 0.0
        self._held.append((end_ms, ending.number, ending.arrival_ms, record))
        self._came.append(ending.arrival_ms)
        self._went.append(ending.arrival_ms + (ending.e2e_ms or 0.0))

    def release(self, before_ms: float = float("inf"), in_flight_ms: Floats = _NOTHING) -> list[Record]:
        """Those that ended before ``before_ms``, at which or later everything else ends. ``in_flight_ms``: arrivals of
        what is to end yet; all other arrivals come at ``before_ms`` or later too."""
        ready = sorted(held for held in self._held if held[0] < before_ms)
        self._held = [held for held in self._held if held[0] >= before_ms]
        self._arrivals_ms = np.append(self._arrivals_ms, self._came)
        self._ends_ms = np.append(self._ends_ms, self._went)
        self._came, self._went = [], []
        arrivals_ms = np.array([arrival_ms for _, _, arrival_ms, _ in ready])
        arrived = _count_until(arrivals_ms, self._arrivals_ms) + _count_until(arrivals_ms, in_flight_ms)
        gone = _count_until(arrivals_ms, self._ends_ms)
        earlier = self._earlier_arrivals - self._earlier_ends
        for (_, _, _, record), count in zip(ready, (arrived - gone + earlier).tolist(), strict=True):
            record.concurrency = max(1, count)
        self._forget(before_ms, in_flight_ms)
        return [record for _, _, _, record in ready]

    def _forget(self, before_ms: float, in_flight_ms: Floats) -> None:
        """Only count what came and went before any arrival to be asked for."""
        asked_ms = min((arrival_ms for _, _, arrival_ms, _ in self._held), default=before_ms)
        asked_ms = min(asked_ms, before_ms, float(in_flight_ms.min(initial=np.inf)))
        arrivals_ms, ends_ms = self._arrivals_ms, self._ends_ms
        self._arrivals_ms, self._ends_ms = arrivals_ms[arrivals_ms > asked_ms], ends_ms[ends_ms > asked_ms]
        self._earlier_arrivals += len(arrivals_ms) - len(self._arrivals_ms)
        self._earlier_ends += len(ends_ms) - len(self._ends_ms)


def _count_until(moments_ms: Floats, times_ms: Floats) -> Int64Array:
    """How many of ``times_ms`` are at each of ``moments_ms`` or before."""
    near_ms = times_ms[times_ms <= moments_ms.max(initial=-np.inf)]
    return np.searchsorted(np.sort(near_ms), moments_ms, side="right")


def _predicted(ending: Ending, block_size: int, *, keep_hashes: bool) -> Record:
    """The ending's record with what was predicted in place of what was recorded."""
    record = ending.record
    record.arrival_ms = round(ending.arrival_ms, DECIMALS)
    record.scheduled_ms = record.first_byte_ms = record.ttft_ms = record.output_tokens = record.cached_tokens = None
    record.itl_ms, record.itl_tokens, record.extra = [], [], {}
    record.e2e_ms = None if ending.e2e_ms is None else round(ending.e2e_ms, DECIMALS)
    if ending.think_ms is not None:
        record.think_ms = ending.think_ms
    if not keep_hashes:
        record.block_hashes = record.output_block_hashes = record.hash_source = None
    if ending.outcome == "as_recorded":
        return record
    if ending.reached:
        _set_run(record, ending, block_size)
    else:
        record.status, record.error = "error", _FAILURES[ending.outcome]
        record.http_status = record.finish_reason = None
    return record


def _set_run(record: Record, ending: Ending, block_size: int) -> None:
    tokens = ending.output_tokens
    if ending.outcome == "aborted":
        record.finish_reason = record.kv_blocks = None
    else:
        record.status, record.http_status, record.error = "ok", 200, None
        record.finish_reason = record.finish_reason or "length"
        record.kv_blocks = -(-(ending.prompt_tokens + tokens - 1) // block_size)
    if record.stream is not False and ending.ttft_ms is not None:
        record.ttft_ms = round(ending.ttft_ms, DECIMALS)
        if tokens > 1:
            gaps: Any = ending.itl_ms
            record.itl_ms, record.itl_tokens = gaps, _ones(gaps, tokens - 1)
    record.output_tokens, record.cached_tokens = tokens, ending.cached_tokens
    record.queue_ms = None if ending.queue_ms is None else round(ending.queue_ms, DECIMALS)
    record.preemptions = ending.preemptions


def _ones(gaps: list[float] | msgspec.Raw, count: int) -> Any:
    """A token a read, in the form that the gaps are in."""
    return [1] * count if isinstance(gaps, list) else _ones_text(count)


@cache
def _ones_text(count: int) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b"1," * (count - 1) + b"1]")


@dataclass(frozen=True, slots=True)
class CohortSummary:
    """TTFT of a cohort's requests that got a first token, ms."""

    name: str
    requests: int
    p50_ms: float
    p90_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A predicted trace in a few lines."""

    requests: int
    not_ok: int
    unservable: int
    """Those of ``not_ok`` that are too long for this engine."""
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    steps: int
    arrivals_ms: float
    """From the first arrival to the last."""
    drain_ms: float
    """From the last arrival to the last end."""
    cohorts: list[CohortSummary]

    @property
    def is_overrun(self) -> bool:
        """Whether the engine took longer, and more than a minute longer, to finish than the requests took to come: then
        they came faster than it serves them, and TTFTs say how long the trace is."""
        return self.drain_ms > max(self.arrivals_ms, 60_000.0)

    @property
    def hit_rate(self) -> float:
        """Cached share of the prompt tokens of the requests that ran."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Tally:
    """Counts predicted records as they are written."""

    def __init__(self) -> None:
        self._requests = self._not_ok = self._unservable = self._prompt_tokens = self._cached_tokens = 0
        self._first_ms, self._last_ms, self._end_ms = math.inf, -math.inf, -math.inf
        self._ttfts_ms = {name: array("d") for name in ("all", "turn 1", "turns 2+")}

    def add(self, records: Iterable[Record]) -> None:
        """Count ``records``."""
        for record in records:
            self._requests += 1
            self._not_ok += record.status != "ok"
            self._unservable += record.error == _FAILURES["unservable"]
            self._note_span(record.arrival_ms or 0.0, record.e2e_ms or 0.0)
            if record.cached_tokens is not None:
                self._prompt_tokens += record.prompt_tokens or 0
                self._cached_tokens += record.cached_tokens
            if record.ttft_ms is not None:
                self._ttfts_ms["all"].append(record.ttft_ms)
                if record.turn is not None:
                    self._ttfts_ms["turn 1" if record.turn == 1 else "turns 2+"].append(record.ttft_ms)

    def _note_span(self, arrival_ms: float, e2e_ms: float) -> None:
        self._first_ms = min(self._first_ms, arrival_ms)
        self._last_ms = max(self._last_ms, arrival_ms)
        self._end_ms = max(self._end_ms, arrival_ms + e2e_ms)

    def summary(self, preemptions: int, steps: int) -> Summary:
        """What was counted, and TTFT for all, for turn 1 and for later turns."""
        return Summary(
            requests=self._requests,
            not_ok=self._not_ok,
            unservable=self._unservable,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            preemptions=preemptions,
            steps=steps,
            arrivals_ms=self._last_ms - self._first_ms if self._requests else 0.0,
            drain_ms=self._end_ms - self._last_ms if self._requests else 0.0,
            cohorts=[_cohort(name, ttfts_ms) for name, ttfts_ms in self._ttfts_ms.items() if ttfts_ms],
        )


def _cohort(name: str, ttfts_ms: Sequence[float]) -> CohortSummary:
    p50, p90, p99 = (float(value) for value in np.quantile(ttfts_ms, [0.5, 0.9, 0.99]))
    return CohortSummary(name, len(ttfts_ms), p50, p90, p99)


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
    """Header of a predicted trace, and its manifest: all that decided it. The same header gives the same records.

    ``digest``: of the trace that was simulated.
    """
    return msgspec.structs.replace(
        meta,
        source="sim",
        model=meta.model or model.model_name,
        engine=EngineInfo(
            name="kvtape-sim",
            version=_version(),
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


def _version() -> str | None:
    """Return the version of the installed package; None: not installed as a package."""
    try:
        return importlib.metadata.version("kvtape")
    except importlib.metadata.PackageNotFoundError:
        return None
