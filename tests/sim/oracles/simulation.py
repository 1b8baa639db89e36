"""A finished simulation as objects: one ``RequestRun`` per arrival, and the engine's steps; for tests and benches."""

import math
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from librt.vecs import vec
from mypy_extensions import i64

from measure.cache.vectors import array_of
from sim.engine import simulation
from sim.engine.apiserver import SHARED_CORE
from sim.engine.gap_json import DECIMALS
from sim.engine.results import EngineResults, Results, finished_records
from sim.engine.simulatedrequest import OUTCOMES, SimulatedRequest
from sim.latency.modelfile import Model
from sim.latency.stepcost import NUM_ROW_TERMS, NUM_STEP_TERMS
from sim.latency.terms import StepRow
from sim.vllm.config import EngineConfig
from sim.vllm.request import NOT_ADMITTED
from sim.workload.arrivals import NOBODY, Arrivals
from sim.workload.chain import FIRST_PRIVATE
from tests.sim.oracles.arrival import Arrival
from tests.sim.oracles.readable.request import Request
from tests.sim.oracles.readable.scheduler import PrefixStats
from tracefile.records.arrays import FloatArray, IntArray, UInt64Array
from tracefile.records.batches import Batch
from tracefile.records.schema import Record


class Timeline:
    """Steps in order of time; they never overlap, and between them the engine is idle.

    On a core shared with the front end, the latter's work while the engine is idle is in here too, as a step of none
    of the engine's terms.
    """

    __slots__ = ("delivered_ms", "ends_ms", "rows", "starts_ms")

    def __init__(self) -> None:
        self.starts_ms: list[float] = []
        self.ends_ms: list[float] = []
        self.rows: list[StepRow] = []
        self.delivered_ms: list[float] = []
        """When clients see a step's tokens: at its end, or later where a first token is among them."""

    @classmethod
    def of_arrays(
        cls, starts_ms: FloatArray, ends_ms: FloatArray, rows: FloatArray, delivered_ms: FloatArray
    ) -> "Timeline":
        """A timeline that is complete; ``rows``: shape (steps, terms)."""
        timeline = cls()
        timeline.starts_ms, timeline.ends_ms = starts_ms.tolist(), ends_ms.tolist()
        timeline.rows = cast(list[StepRow], rows)  # its rows are read as StepRow
        timeline.delivered_ms = delivered_ms.tolist()
        return timeline

    def __len__(self) -> int:
        return len(self.ends_ms)

    @property
    def engine_steps(self) -> int:
        """Steps in which the engine itself computed."""
        return int(np.count_nonzero(np.asarray(self.rows)[:, 0])) if len(self) else 0

    def append(self, start_ms: float, end_ms: float, row: StepRow) -> None:
        """Add a step that began when or after the last one ended, and whose tokens are seen no sooner than its."""
        self.delivered_ms.append(max(end_ms, self.delivered_ms[-1]) if self.delivered_ms else end_ms)
        self.starts_ms.append(start_ms)
        self.ends_ms.append(end_ms)
        self.rows.append(row)

    def delay(self, until_ms: float) -> None:
        """The last step's tokens are seen at ``until_ms``, unless they are only seen later than that."""
        self.delivered_ms[-1] = max(self.delivered_ms[-1], until_ms)

    def check_integrity(self) -> None:
        """Raise AssertionError if steps overlap."""
        assert len(self.starts_ms) == len(self.ends_ms) == len(self.rows) == len(self.delivered_ms)
        assert self.delivered_ms == sorted(self.delivered_ms)
        moments = [moment for pair in zip(self.starts_ms, self.ends_ms, strict=True) for moment in pair]
        assert moments == sorted(moments), "steps overlap"


@dataclass(slots=True)
class RequestRun:
    """What became of one arrival. Times on the trace's clock, ms."""

    arrival: Arrival
    arrival_ms: float
    request: Request | None = None
    """None until it arrives; stays None where the engine never gets it."""
    entry_ms: float | None = None
    """When the scheduler got it."""
    admitted_ms: float | None = None
    """When the step was composed that first served it."""
    token_steps: MutableSequence[int] = field(default_factory=list)
    """The step at whose end each token appeared, as a position in the timeline."""
    outcome: str | None = None
    """ok, aborted, unservable, parent_failed, as_recorded. None: not ended yet."""
    ttft_ms: float | None = None
    """From arrival to the first token."""
    itl_ms: FloatArray = field(default_factory=lambda: np.empty(0))
    e2e_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Simulation:
    """A finished run: a request_run per arrival, in their order, and the engine's steps."""

    runs: list[RequestRun]
    timeline: Timeline
    prefix: PrefixStats
    preemptions: int
    block_size: int
    """Tokens in a block of the engine's."""


def simulate(arrivals: Sequence[Arrival], config: EngineConfig, model: Model, *, seed: int | None = None) -> Simulation:
    """Run ``arrivals`` on an engine in virtual time. ``seed`` None: no draws, the noise's medians."""
    return read_simulation(
        arrivals, simulation.simulate(columns(arrivals), config, model, seed, keeps_rows=True), config.block_size
    )


def read_simulation(arrivals: Sequence[Arrival], run: simulation.Simulation, block_size: int) -> Simulation:
    """The run as the plain engine gives it: a request_run per arrival, and the steps."""
    engine, delivered_ms = run.engine, run.delivered_ms
    width = NUM_ROW_TERMS if engine.server.placement == SHARED_CORE else NUM_STEP_TERMS
    starts_ms, ends_ms = (array_of(part, np.float64) for part in (engine.starts_ms, engine.ends_ms))
    steps = Timeline.of_arrays(starts_ms, ends_ms, run.rows[:, :width], delivered_ms)
    stats = engine.scheduler.stats
    prefix = PrefixStats(int(stats.requests), int(stats.query_tokens), int(stats.hit_tokens))
    runs = [_request_run(*pair, delivered_ms) for pair in zip(arrivals, run.requests, strict=True)]
    return Simulation(runs, steps, prefix, int(engine.preemptions), block_size)


def _request_run(arrival: Arrival, request: SimulatedRequest, delivered_ms: FloatArray) -> RequestRun:
    request.close_run()
    runs = list(request.token_runs)
    steps = [first + more for first, count in zip(runs[::2], runs[1::2], strict=True) for more in range(count)]
    return RequestRun(
        arrival=arrival,
        arrival_ms=request.arrival_ms,
        request=_request(arrival, request) if request.has_arrived else None,
        entry_ms=_shared(request.entry_ms),
        admitted_ms=_shared(request.admitted_ms),
        token_steps=steps,
        outcome=OUTCOMES[request.outcome] or None,
        ttft_ms=_shared(request.ttft_ms),
        itl_ms=np.diff(delivered_ms[steps]),
        e2e_ms=_shared(request.e2e_ms),
    )


def _request(arrival: Arrival, reached: SimulatedRequest) -> Request:
    """What the scheduler knew of it."""
    request = Request(
        arrival.record.request_id,
        arrival.prompt_tokens,
        arrival.output_tokens,
        arrival.hashes,
        reached.arrival_ms,
        reached.index,
        cached_tokens=None if reached.cached_tokens < 0 else reached.cached_tokens,
        preemptions=reached.preemptions,
    )
    request.num_tokens = reached.num_tokens
    return request


def _shared(time_ms: float) -> float | None:
    return None if time_ms != time_ms else time_ms  # noqa: PLR0124 - NaN, and cheaper than asking


def ended_request(request_run: RequestRun) -> SimulatedRequest:
    """That of a plain flight that has an outcome; the steps of its tokens are left out."""
    assert request_run.outcome is not None
    arrival, reached = request_run.arrival, request_run.request
    request = SimulatedRequest("", max(arrival.prompt_tokens, 1), 1, vec[i64](), arrival_ms=request_run.arrival_ms)
    request.prepare()
    request.outcome, request.num_delivered = OUTCOMES.index(request_run.outcome), len(request_run.token_steps)
    for name in ("ttft_ms", "e2e_ms", "entry_ms", "admitted_ms"):
        time_ms = getattr(request_run, name)
        setattr(request, name, math.nan if time_ms is None else time_ms)
    if reached is not None:
        request.has_arrived, request.preemptions = True, reached.preemptions
        request.cached_tokens = NOT_ADMITTED if reached.cached_tokens is None else reached.cached_tokens
    return request


def results_of(runs: Sequence[RequestRun]) -> Results:
    """Those of the flights that have an outcome."""
    positions = np.array([position for position, run in enumerate(runs) if run.outcome is not None], np.int64)
    ended = [ended_request(runs[position]) for position in positions.tolist()]
    return Results(columns([run.arrival for run in runs]), [EngineResults(ended, positions, vec[float]())])


def predicted_records(simulation: Simulation, *, keep_hashes: bool = True) -> list[Record]:
    """One record per request_run, in order of their ends. ``concurrency`` is counted anew from the predicted times."""
    results = results_of(simulation.runs)
    gaps_ms = {run.arrival.record.request_id: np.round(run.itl_ms, DECIMALS).tolist() for run in simulation.runs}
    records = list(finished_records(results, simulation.block_size, keep_hashes=keep_hashes))
    for record in records:
        if record.itl_ms:  # a text of the gaps, of no steps here
            record.itl_ms = gaps_ms[record.request_id]
            record.itl_tokens = [1] * len(record.itl_ms)
    return records


def columns(arrivals: Sequence[Arrival]) -> Arrivals:
    """A complete workload of objects as columns."""
    hashes, known = shared_keys([arrival.hashes for arrival in arrivals])
    parents = np.array([NOBODY if arrival.parent is None else arrival.parent for arrival in arrivals], np.int64)
    positions = np.arange(len(arrivals))
    return Arrivals(
        ids=[arrival.record.request_id for arrival in arrivals],
        numbers=positions,
        arrival_ms=_floats([arrival.arrival_ms for arrival in arrivals]),
        prompt_tokens=np.array([arrival.prompt_tokens for arrival in arrivals], np.int64),
        output_tokens=np.array([arrival.output_tokens for arrival in arrivals], np.int64),
        runs=np.array([arrival.kind == "runs" for arrival in arrivals], bool),
        prompt_logprobs=np.array([bool(arrival.record.prompt_logprobs) for arrival in arrivals], np.int64),
        abort_after_ms=_floats([arrival.abort_after_ms for arrival in arrivals]),
        recorded_e2e_ms=_floats([arrival.record.e2e_ms for arrival in arrivals]),
        parents=parents,
        think_ms=_floats([None if arrival.parent is None else arrival.think_ms for arrival in arrivals]),
        full_blocks=np.array([len(arrival.hashes) for arrival in arrivals], np.int64),
        hashed_blocks=known,
        hashes=hashes,
        batch=Batch([arrival.record for arrival in arrivals]),
        rows=positions,
    )


def shared_keys(chains: Sequence[Sequence[int]]) -> tuple[UInt64Array, IntArray]:
    """The true hashes of each chain, which come before its private keys, chain after chain; how many each has."""
    known = [[key for key in chain if key > FIRST_PRIVATE] for chain in chains]
    return np.array([key for chain in known for key in chain], np.uint64), np.array([len(c) for c in known], np.int64)


def _floats(values: Sequence[float | None]) -> FloatArray:
    return np.array(values, np.float64)
