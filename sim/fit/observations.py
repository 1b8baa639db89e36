"""Observations of a capture: intervals of time between seen tokens, and the work in each.

The schedule is the capture's own (``sim.fit.capturedschedule``), so that the work of an interval is known before any
parameter is; a step that ten requests read is observed once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from statistics import median
from typing import Self

import numpy as np

from sim.engine.simulatedrequest import SimulatedRequest
from sim.fit.schedule import CapturedStep, Reconstruction, seen_tokens
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
"""Reads closer than this behind a first token's are of one moment."""
_NO_COSTS = (0.0,) * NUM_TERMS


@dataclass(frozen=True, slots=True)
class Observations:
    """Intervals of time, n of them, each from a seen moment to the next; predicted by ``counts @ parameters``."""

    start_ms: FloatArray
    """On the trace's clock; shape (n,)."""
    seen_ms: FloatArray
    """Length; shape (n,)."""
    counts: FloatArray
    """Terms in the order of ``TERMS``; shape (n, terms)."""
    is_prefill: BoolArray
    """Prompt tokens were computed in it. Else it is of decodes only."""
    opens: BoolArray
    """It begins with a request's arrival at an idle engine, and the API server's work on it."""
    steps: IntArray
    """Number of its steps; more than one where the ends of the others were not seen."""
    session: IntArray
    """Of the request that has most tokens in it, numbered over all captures."""
    capture: IntArray

    def select(self, kept: BoolArray) -> "Observations":
        return Observations(*(getattr(self, field.name)[kept] for field in fields(self)))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Join captures; sessions and captures are numbered on."""
        columns = {field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)}
        firsts = np.cumsum([0, *(part.session.max(initial=-1) + 1 for part in parts)])
        columns["session"] = np.concatenate([part.session + first for part, first in zip(parts, firsts, strict=False)])
        columns["capture"] = np.repeat(np.arange(len(parts)), [len(part.seen_ms) for part in parts])
        return cls(**columns)


def observe(
    records: Sequence[Record],
    schedule: Reconstruction,
    placement: FrontendPlacement,
    costs: Sequence[float] = _NO_COSTS,
) -> Observations:
    """Return the intervals of a capture; ``records`` are in the order of the schedule's requests.

    ``costs``: of an API server on the engine's core.
    An interval ends with a step some of whose tokens were seen, at the median over its readers. Left out are intervals
    without a known begin, as the next request was still in the API server; intervals after a step whose only reads are
    first tokens, whose delivery takes longer by an unknown time; and those of requests whose first token came out in
    another step than the rules put it.
    """
    misplaced = {place for place, steps in enumerate(schedule.steps_off) if steps}
    seen = [seen_tokens(record) for record in records]
    front = _ApiServer(schedule, placement, costs)
    sessions: dict[str, int] = {}
    rows: list[tuple[float, float, bool, int, int]] = []
    counts: list[FloatArray] = []
    begun_ms: float | None = None
    begun_tokens, held_up_ms = 0, -math.inf
    waiting: list[CapturedStep] = []
    for step, following in zip_longest(schedule.timeline, schedule.timeline[1:]):
        if step.opener is not None:
            begun_ms, begun_tokens, waiting = step.start_ms, 0, []
        elif not step.continues and not waiting:
            begun_ms = None
        waiting.append(step)
        reads = [(seen[place][token], token) for place, token in step.sampling if 0 <= token < len(seen[place])]
        reads = [(time_ms, token) for time_ms, token in reads if time_ms == time_ms]  # noqa: PLR0124 - not NaN
        if not reads:
            continue
        end_ms = median(time_ms for time_ms, _ in reads)
        if end_ms < held_up_ms:  # by the first tokens before it, and read with them: no moment of its own
            waiting = [] if begun_ms is None else waiting
            continue
        first_tokens = front.first_tokens(step)
        if begun_ms is not None and end_ms > begun_ms and not any(one.largest in misplaced for one in waiting):
            largest = records[max(waiting, key=lambda one: one.row[PREFILL_TOKENS]).largest]
            session = sessions.setdefault(largest.session_id or largest.request_id, len(sessions))
            counts.append(front.counts(waiting, begun_ms, end_ms))
            goes_on = following is not None and following.opener is None
            counts[-1][DELIVERED_TOKENS] += front.delays(goes_on=goes_on) * first_tokens - begun_tokens
            rows.append((begun_ms, end_ms, waiting[0].opener is not None, len(waiting), session))
        begun_ms = end_ms if any(token for _, token in reads) else None
        begun_tokens = first_tokens
        held_up_ms = end_ms + _TOGETHER_MS if first_tokens else -math.inf
        waiting = []
    return _assemble(rows, counts)


class _ApiServer:
    def __init__(self, schedule: Reconstruction, placement: FrontendPlacement, costs: Sequence[float]) -> None:
        self._requests = schedule.requests
        shared = placement == "shared_core"
        self._reception = Reception(self._requests, schedule.timeline, costs) if shared else None

    def first_tokens(self, step: CapturedStep) -> int:
        return sum(self._requests[place].prompt_tokens for place, token in step.sampling if token == 0)

    def delays(self, *, goes_on: bool) -> int:
        """Factor by which a delivery delays its read: 2 on a shared core if the engine goes on, else 1."""
        return 2 if self._reception is not None and goes_on else 1

    def counts(self, steps: Sequence[CapturedStep], begun_ms: float, end_ms: float) -> FloatArray:
        """Terms of ``steps`` and of the API server's work: the opening request's; on a shared core, all."""
        total = np.zeros(NUM_TERMS)
        total[:NUM_STEP_TERMS] = np.sum([step.row for step in steps], axis=0)
        opener = steps[0].opener
        if self._reception is not None:
            total[[RECEIVED, RECEIVED_TOKENS]] += self._reception.between(begun_ms, end_ms)
        elif opener is not None:
            total[[RECEIVED, RECEIVED_TOKENS]] += (1.0, float(self._requests[opener].prompt_tokens))
        return total


def _assemble(rows: Sequence[tuple[float, float, bool, int, int]], counts: Sequence[FloatArray]) -> Observations:
    begun_ms, end_ms, opens, steps, session = (
        (np.array(column) for column in zip(*rows, strict=True)) if rows else (np.zeros(0) for _ in range(5))
    )
    every = np.stack(counts) if counts else np.zeros((0, NUM_TERMS))
    return Observations(
        start_ms=begun_ms,
        seen_ms=end_ms - begun_ms,
        counts=every,
        is_prefill=every[:, PREFILL_TOKENS] > 0.0,
        opens=opens.astype(np.bool_),
        steps=steps.astype(np.int64),
        session=session.astype(np.int64),
        capture=np.zeros(len(rows), dtype=np.int64),
    )


_LEAST_MS = 1e-6
"""Of work on a request: it has to begin before it ends."""


class Reception:
    """Requests and prompt tokens that an API server on the engine's core has received by any time.

    It receives requests one by one, and gets half of the core while the engine computes.
    """

    def __init__(
        self, requests: Sequence[SimulatedRequest], timeline: Sequence[CapturedStep], costs: Sequence[float]
    ) -> None:
        came = np.array(sorted((one.arrival_ms, one.prompt_tokens) for one in requests if not one.is_as_recorded))
        came_ms, tokens = came.reshape(-1, 2).T
        cost = StepCost(list(costs))
        # A step after a rest begins when the request that ended it has been received, with nothing beside.
        rested_ms = [
            0.0 if one.opener is None else cost.reception_ms(requests[one.opener].prompt_tokens) for one in timeline
        ]
        steps = [(one.start_ms + rest_ms, one.end_ms) for one, rest_ms in zip(timeline, rested_ms, strict=True)]
        self._moments_ms, self._cores_ms = _core_time(steps, float(came_ms.min(initial=np.inf)))
        done_ms = -np.inf
        edges_ms: list[float] = []
        for arrived_ms, prompt_tokens in zip(self._core_ms(came_ms), tokens, strict=True):
            began_ms = max(float(arrived_ms), done_ms)
            done_ms = began_ms + max(cost.reception_ms(int(prompt_tokens)), _LEAST_MS)
            edges_ms += [began_ms, done_ms]
        self._edges_ms = np.array(edges_ms)
        self._requests = np.repeat(np.arange(len(came) + 1.0), 2)[1:-1]
        self._tokens = np.repeat(np.cumsum([0.0, *tokens]), 2)[1:-1]

    def between(self, begun_ms: float, end_ms: float) -> tuple[float, float]:
        """Return requests and prompt tokens received in an interval; unfinished ones count in part."""
        cores_ms = self._core_ms(np.array([begun_ms, end_ms]))
        requests = np.interp(cores_ms, self._edges_ms, self._requests)
        tokens = np.interp(cores_ms, self._edges_ms, self._tokens)
        return float(requests[1] - requests[0]), float(tokens[1] - tokens[0])

    def _core_ms(self, times_ms: FloatArray) -> FloatArray:
        return np.interp(times_ms, self._moments_ms, self._cores_ms)


def _core_time(steps: Sequence[tuple[float, float]], first_ms: float) -> tuple[FloatArray, FloatArray]:
    """Moments, and the core time that the API server could have had by each: all between steps, half within them."""
    moments_ms, cores_ms = [first_ms], [0.0]
    for start_ms, end_ms in steps:
        for until_ms, share in ((start_ms, 1.0), (end_ms, 0.5)):
            span_ms = until_ms - moments_ms[-1]
            if span_ms > 0.0:
                moments_ms.append(until_ms)
                cores_ms.append(cores_ms[-1] + share * span_ms)
    return np.array(moments_ms), np.array(cores_ms)
