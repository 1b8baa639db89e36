"""Observations of a capture: intervals between token reads, and the prefill and decode work in each interval.

The schedule is reconstructed (``sim.fit.capturedschedule``), so the work of an interval is known before any parameter.
A scheduler step whose tokens ten clients read is observed once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from statistics import median
from typing import Self

import numpy as np

from sim.engine.simulatedrequest import SimulatedRequest
from sim.fit.schedule import CapturedStep, Reconstruction, token_times
from sim.latency.stepcost import (
    DELIVERED_TOKENS,
    NUM_STEP_TERMS,
    NUM_TERMS,
    PREFILL_TOKENS,
    RECEIVED,
    RECEIVED_TOKENS,
    StepCost,
)
from sim.latency.terms import FrontendPlacement
from tracefile.records.arrays import BoolArray, FloatArray, IntArray
from tracefile.records.schema import Record

_TOGETHER_MS = 1.0
"""Largest distance of a read from a first token's read that counts as simultaneous."""
_NO_COSTS = (0.0,) * NUM_TERMS


@dataclass(frozen=True, slots=True)
class Observations:
    """Intervals between token reads, n in total; predicted by ``counts @ parameters``."""

    start_ms: FloatArray
    """On the trace's clock; shape (n,)."""
    measured_ms: FloatArray
    """Length; shape (n,)."""
    counts: FloatArray
    """Terms in the order of ``TERMS``; shape (n, terms)."""
    is_prefill: BoolArray
    """With prefill. False: decodes only."""
    opens: BoolArray
    """Starts with an arrival at an idle engine, and the API server's work on the request."""
    steps: IntArray
    """Scheduler steps; several if only the last has a token read."""
    session: IntArray
    """Session of the request with most tokens in the interval, numbered over all captures."""
    capture: IntArray

    def select(self, mask: BoolArray) -> "Observations":
        return Observations(*(getattr(self, field.name)[mask] for field in fields(self)))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Join captures; sessions and captures are numbered on."""
        columns = {field.name: np.concatenate([getattr(chunk, field.name) for chunk in parts]) for field in fields(cls)}
        firsts = np.cumsum([0, *(chunk.session.max(initial=-1) + 1 for chunk in parts)])
        columns["session"] = np.concatenate(
            [chunk.session + first for chunk, first in zip(parts, firsts, strict=False)]
        )
        columns["capture"] = np.repeat(np.arange(len(parts)), [len(chunk.measured_ms) for chunk in parts])
        return cls(**columns)


def observe(
    records: Sequence[Record],
    schedule: Reconstruction,
    placement: FrontendPlacement,
    costs: Sequence[float] = _NO_COSTS,
) -> Observations:
    """Return the intervals of a capture; ``records`` are in the order of the schedule's requests.

    ``costs``: of an API server on the engine's core.
    An interval ends at the median read time of a step's tokens. Left out are intervals without a known start, as the
    next request was still in the API server; intervals after a step whose only reads are first tokens, which are
    delivered later by an unknown time; and intervals of requests whose first token falls into another step.
    """
    misplaced = {index for index, steps in enumerate(schedule.steps_off) if steps}
    token_ms = [token_times(record) for record in records]
    front = _ApiServer(schedule, placement, costs)
    sessions: dict[str, int] = {}
    rows: list[tuple[float, float, bool, int, int]] = []
    counts: list[FloatArray] = []
    begin_ms: float | None = None
    begin_tokens, delivery_end_ms = 0, -math.inf
    waiting: list[CapturedStep] = []
    for step, following in zip_longest(schedule.timeline, schedule.timeline[1:]):
        if step.opener is not None:
            begin_ms, begin_tokens, waiting = step.start_ms, 0, []
        elif not step.continues and not waiting:
            begin_ms = None
        waiting.append(step)
        reads = [(token_ms[index][token], token) for index, token in step.sampling if 0 <= token < len(token_ms[index])]
        reads = [(time_ms, token) for time_ms, token in reads if time_ms == time_ms]  # noqa: PLR0124 - not NaN
        if not reads:
            continue
        end_ms = median(time_ms for time_ms, _ in reads)
        if end_ms < delivery_end_ms:  # read together with the first tokens before: no time of its own
            waiting = [] if begin_ms is None else waiting
            continue
        first_tokens = front.first_tokens(step)
        if begin_ms is not None and end_ms > begin_ms and not any(past.largest in misplaced for past in waiting):
            largest = records[max(waiting, key=lambda past: past.row[PREFILL_TOKENS]).largest]
            session = sessions.setdefault(largest.session_id or largest.request_id, len(sessions))
            counts.append(front.counts(waiting, begin_ms, end_ms))
            continues = following is not None and following.opener is None
            counts[-1][DELIVERED_TOKENS] += front.delays(continues=continues) * first_tokens - begin_tokens
            rows.append((begin_ms, end_ms, waiting[0].opener is not None, len(waiting), session))
        begin_ms = end_ms if any(token for _, token in reads) else None
        begin_tokens = first_tokens
        delivery_end_ms = end_ms + _TOGETHER_MS if first_tokens else -math.inf
        waiting = []
    return _assemble(rows, counts)


class _ApiServer:
    def __init__(self, schedule: Reconstruction, placement: FrontendPlacement, costs: Sequence[float]) -> None:
        self._requests = schedule.requests
        shared = placement == "shared_core"
        self._reception = Reception(self._requests, schedule.timeline, costs) if shared else None

    def first_tokens(self, step: CapturedStep) -> int:
        return sum(self._requests[index].prompt_tokens for index, token in step.sampling if token == 0)

    def delays(self, *, continues: bool) -> int:
        """Return by how many delivery times a read is late: 2 on a shared core while the engine runs, else 1."""
        return 2 if self._reception is not None and continues else 1

    def counts(self, steps: Sequence[CapturedStep], begin_ms: float, end_ms: float) -> FloatArray:
        total = np.zeros(NUM_TERMS)
        total[:NUM_STEP_TERMS] = np.sum([step.row for step in steps], axis=0)
        opener = steps[0].opener
        if self._reception is not None:
            total[[RECEIVED, RECEIVED_TOKENS]] += self._reception.between(begin_ms, end_ms)
        elif opener is not None:
            total[[RECEIVED, RECEIVED_TOKENS]] += (1.0, float(self._requests[opener].prompt_tokens))
        return total


def _assemble(rows: Sequence[tuple[float, float, bool, int, int]], counts: Sequence[FloatArray]) -> Observations:
    begin_ms, end_ms, opens, steps, session = (
        (np.array(column) for column in zip(*rows, strict=True)) if rows else (np.zeros(0) for _ in range(5))
    )
    every = np.stack(counts) if counts else np.zeros((0, NUM_TERMS))
    return Observations(
        start_ms=begin_ms,
        measured_ms=end_ms - begin_ms,
        counts=every,
        is_prefill=every[:, PREFILL_TOKENS] > 0.0,
        opens=opens.astype(np.bool_),
        steps=steps.astype(np.int64),
        session=session.astype(np.int64),
        capture=np.zeros(len(rows), dtype=np.int64),
    )


_LEAST_MS = 1e-6
"""Shortest reception, so that start and end differ."""


class Reception:
    """Requests and prompt tokens that an API server on the engine's core has received by a time.

    The API server receives requests in sequence, and gets half of the core while the engine runs a batch.
    """

    def __init__(
        self, requests: Sequence[SimulatedRequest], timeline: Sequence[CapturedStep], costs: Sequence[float]
    ) -> None:
        rows = np.array(sorted((item.arrival_ms, item.prompt_tokens) for item in requests if not item.is_as_recorded))
        arrivals_ms, tokens = rows.reshape(-1, 2).T
        cost = StepCost(list(costs))
        # The first step after an idle time starts when its request has been received.
        reception_ms = [
            0.0 if step.opener is None else cost.reception_ms(requests[step.opener].prompt_tokens) for step in timeline
        ]
        steps = [(step.start_ms + wait_ms, step.end_ms) for step, wait_ms in zip(timeline, reception_ms, strict=True)]
        self._moments_ms, self._cores_ms = _core_time(steps, float(arrivals_ms.min(initial=np.inf)))
        done_ms = -np.inf
        edges_ms: list[float] = []
        for arrived_ms, prompt_tokens in zip(self._core_ms(arrivals_ms), tokens, strict=True):
            began_ms = max(float(arrived_ms), done_ms)
            done_ms = began_ms + max(cost.reception_ms(int(prompt_tokens)), _LEAST_MS)
            edges_ms += [began_ms, done_ms]
        self._edges_ms = np.array(edges_ms)
        self._requests = np.repeat(np.arange(len(rows) + 1.0), 2)[1:-1]
        self._tokens = np.repeat(np.cumsum([0.0, *tokens]), 2)[1:-1]

    def between(self, begin_ms: float, end_ms: float) -> tuple[float, float]:
        """Return requests and prompt tokens received in an interval; requests in progress count in part."""
        cores_ms = self._core_ms(np.array([begin_ms, end_ms]))
        requests = np.interp(cores_ms, self._edges_ms, self._requests)
        tokens = np.interp(cores_ms, self._edges_ms, self._tokens)
        return float(requests[1] - requests[0]), float(tokens[1] - tokens[0])

    def _core_ms(self, times_ms: FloatArray) -> FloatArray:
        return np.interp(times_ms, self._moments_ms, self._cores_ms)


def _core_time(steps: Sequence[tuple[float, float]], first_ms: float) -> tuple[FloatArray, FloatArray]:
    """Return times and cumulative core time of the API server: all between scheduler steps, half within."""
    moments_ms, cores_ms = [first_ms], [0.0]
    for start_ms, end_ms in steps:
        for until_ms, share in ((start_ms, 1.0), (end_ms, 0.5)):
            span_ms = until_ms - moments_ms[-1]
            if span_ms > 0.0:
                moments_ms.append(until_ms)
                cores_ms.append(cores_ms[-1] + share * span_ms)
    return np.array(moments_ms), np.array(cores_ms)
