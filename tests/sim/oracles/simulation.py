"""A finished simulation as objects: one ``RequestRun`` per arrival, and the engine's steps; for tests and benches."""

import copy
from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from sim.engine.gaptexts import DECIMALS
from sim.engine.results import RequestResult, finished_records
from sim.engine.simstate import build_state
from sim.kernels import layout
from sim.kernels.layout import SimState
from sim.kernels.loop import run_state
from sim.latency.modelfile import Model
from sim.latency.terms import StepRow
from sim.vllm.config import EngineConfig
from sim.vllm.request import Request, State
from sim.vllm.scheduler import PrefixStats
from sim.workload.arrivals import NOBODY, Arrival, Arrivals
from sim.workload.chain import is_private
from tracefile import Record
from tracefile.records.arrays import FloatArray, IntArray, UInt64Array
from tracefile.records.batches import Batch

_STATES: tuple[State, ...] = ("waiting", "running", "finished")


class Timeline:
    """Steps in order of time; they never overlap, and between them the engine is idle.

    On a core shared with the front end, the latter's work while the engine is idle is in here too, as a step of none
    of the engine's terms.
    """

    __slots__ = ("ends_ms", "rows", "seen_ms", "starts_ms")

    def __init__(self) -> None:
        self.starts_ms: list[float] = []
        self.ends_ms: list[float] = []
        self.rows: list[StepRow] = []
        self.seen_ms: list[float] = []
        """When clients see a step's tokens: at its end, or later where a first token is among them."""

    @classmethod
    def of_arrays(cls, starts_ms: FloatArray, ends_ms: FloatArray, rows: FloatArray, seen_ms: FloatArray) -> "Timeline":
        """A timeline that is complete; ``rows``: shape (steps, terms)."""
        timeline = cls()
        timeline.starts_ms, timeline.ends_ms = starts_ms.tolist(), ends_ms.tolist()
        timeline.rows = cast(list[StepRow], rows)  # its rows are read as any others
        timeline.seen_ms = seen_ms.tolist()
        return timeline

    def __len__(self) -> int:
        return len(self.ends_ms)

    @property
    def engine_steps(self) -> int:
        """Steps in which the engine itself computed."""
        return int(np.count_nonzero(np.asarray(self.rows)[:, 0])) if len(self) else 0

    def append(self, start_ms: float, end_ms: float, row: StepRow) -> None:
        """Add a step that began when or after the last one ended, and whose tokens are seen no sooner than its."""
        self.seen_ms.append(max(end_ms, self.seen_ms[-1]) if self.seen_ms else end_ms)
        self.starts_ms.append(start_ms)
        self.ends_ms.append(end_ms)
        self.rows.append(row)

    def delay(self, until_ms: float) -> None:
        """The last step's tokens are seen at ``until_ms``, unless they are only seen later than that."""
        self.seen_ms[-1] = max(self.seen_ms[-1], until_ms)

    def check_integrity(self) -> None:
        """Raise AssertionError unless steps follow each other."""
        assert len(self.starts_ms) == len(self.ends_ms) == len(self.rows) == len(self.seen_ms)
        assert self.seen_ms == sorted(self.seen_ms)
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
    """The step at whose end each token appeared, as a place in the timeline."""
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
    return read_simulation(arrivals, run_state(build_state(columns(arrivals), config, model, seed)))


def read_simulation(arrivals: Sequence[Arrival], state: SimState) -> Simulation:
    """The run as the pure engine gives it: a request_run per arrival, and the steps."""
    count, clock = int(state.clock["num_steps"][0]), state.clock[0]
    steps = Timeline.of_arrays(*(part[:count] for part in state.timeline))
    stats = PrefixStats(*(int(state.scheduler.stats[name][0]) for name in layout.PREFIX_STATS.names or ()))
    # Whole records turned into Python's numbers at once, which is faster than one by one.
    each = zip(arrivals, state.runs.tolist(), state.scheduler.requests[:-1].tolist(), strict=True)
    runs = [_request_run(state, place, *parts) for place, parts in enumerate(each)]
    block_size = int(state.scheduler.settings["block_size"][0])
    return Simulation(runs, steps, stats, int(clock["preemptions"]), block_size)


def _request_run(
    state: SimState, place: int, arrival: Arrival, request_run: Sequence[float], request: Sequence[int]
) -> RequestRun:
    seen_of = dict(zip(layout.REQUEST_RUN.names or (), request_run, strict=True))
    first, seen = max(int(seen_of["first_token"]), 0), int(seen_of["num_seen"])
    return RequestRun(
        arrival=arrival,
        arrival_ms=seen_of["arrival_ms"],
        request=_request(arrival, place, seen_of["arrival_ms"], request),
        entry_ms=_known(seen_of["entry_ms"]),
        admitted_ms=_known(seen_of["admitted_ms"]),
        token_steps=array("i", state.token_steps[first : first + seen].tobytes()),
        outcome=layout.OUTCOMES[int(seen_of["outcome"])],
        ttft_ms=_known(seen_of["ttft_ms"]),
        itl_ms=state.itl_ms[first + 1 : first + seen],
        e2e_ms=_known(seen_of["e2e_ms"]),
    )


def _request(arrival: Arrival, place: int, arrival_ms: float, fields: Sequence[int]) -> Request | None:
    """What the scheduler knew of it; None: it never came so far."""
    reached = dict(zip(layout.REQUEST.names or (), fields, strict=True))
    if reached["state"] == layout.ABSENT:
        return None
    request = Request(
        arrival.record.request_id,
        arrival.prompt_tokens,
        arrival.output_tokens,
        arrival.hashes,
        arrival_ms,
        place,
        state=_STATES[reached["state"]],
        cached_tokens=None if reached["cached_tokens"] < 0 else reached["cached_tokens"],
        preemptions=reached["preemptions"],
    )
    request.num_tokens = reached["num_tokens"]
    return request


def _known(time_ms: float) -> float | None:
    return None if time_ms != time_ms else time_ms  # noqa: PLR0124 - NaN, and cheaper than asking


def result_of(request_run: RequestRun, number: int) -> RequestResult:
    """That of a plain flight that has one, and its place."""
    assert request_run.outcome is not None
    request, entry_ms, admitted_ms = request_run.request, request_run.entry_ms, request_run.admitted_ms
    return RequestResult(
        copy.copy(request_run.arrival.record),
        number,
        None if request_run.arrival.parent is None else request_run.arrival.think_ms,
        request_run.arrival.prompt_tokens,
        request_run.outcome,
        request_run.arrival_ms,
        request_run.ttft_ms,
        np.round(request_run.itl_ms, DECIMALS).tolist(),
        len(request_run.token_steps),
        request_run.e2e_ms,
        request is not None,
        None if request is None else request.cached_tokens,
        None if entry_ms is None or admitted_ms is None else admitted_ms - entry_ms,
        0 if request is None else request.preemptions,
    )


def predicted_records(simulation: Simulation, *, keep_hashes: bool = True) -> list[Record]:
    """One record per request_run, in order of their ends. ``concurrency`` is counted anew from the predicted times."""
    ended = ((number, one) for number, one in enumerate(simulation.runs) if one.outcome is not None)
    results = (result_of(one, number) for number, one in ended)
    return finished_records(results, simulation.block_size, keep_hashes=keep_hashes)


def columns(arrivals: Sequence[Arrival]) -> Arrivals:
    """A whole workload of objects as columns."""
    hashes, known = known_keys([one.hashes for one in arrivals])
    parents = np.array([NOBODY if one.parent is None else one.parent for one in arrivals], np.int64)
    places = np.arange(len(arrivals))
    return Arrivals(
        ids=[one.record.request_id for one in arrivals],
        numbers=places,
        arrival_ms=_floats([one.arrival_ms for one in arrivals]),
        prompt_tokens=np.array([one.prompt_tokens for one in arrivals], np.int64),
        output_tokens=np.array([one.output_tokens for one in arrivals], np.int64),
        runs=np.array([one.kind == "runs" for one in arrivals], bool),
        prompt_logprobs=np.array([bool(one.record.prompt_logprobs) for one in arrivals], np.int64),
        abort_after_ms=_floats([one.abort_after_ms for one in arrivals]),
        recorded_e2e_ms=_floats([one.record.e2e_ms for one in arrivals]),
        parents=parents,
        think_ms=_floats([None if one.parent is None else one.think_ms for one in arrivals]),
        full_blocks=np.array([len(one.hashes) for one in arrivals], np.int64),
        known=known,
        hashes=hashes,
        sources=(Batch([one.record for one in arrivals]),),
        source=np.zeros(len(arrivals), np.int64),
        rows=places,
    )


def known_keys(chains: Sequence[Sequence[int]]) -> tuple[UInt64Array, IntArray]:
    """The true hashes of each chain, which come before its private keys, chain after chain; how many each has."""
    known = [[key for key in chain if not is_private(key)] for chain in chains]
    return np.array([key for chain in known for key in chain], np.uint64), np.array([len(c) for c in known], np.int64)


def _floats(values: Sequence[float | None]) -> FloatArray:
    return np.array(values, np.float64)
