"""Schedule of a capture: its engine's steps, each request's way through the scheduler, the times of seen tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sim.engine.simulatedrequest import SimulatedRequest
from sim.latency.terms import StepRow
from sim.vllm.request import Request
from tracefile.records.schema import MOST_TOKENS, Record


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step of the schedule. Times on the trace's clock, ms; approximate where no token was seen."""

    start_ms: float
    end_ms: float
    row: StepRow
    sampling: list[tuple[int, int]]
    """Places of those it samples, and which of their tokens."""
    largest: int
    opener: int | None
    """Place of the request whose arrival ended the idleness before it; it began no sooner than that. None: it followed
    on another step."""
    continues: bool
    """Some of its requests had been served before. If not, they may still have been in the API server's hands when it
    could have begun."""


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """A schedule that was run; ``requests`` are in the order of the capture's records."""

    requests: list[SimulatedRequest]
    """Those that the engine got ``has_arrived``."""
    steps_off: list[int]
    """By request: steps after the one that samples its first token here that the token was seen; negative: before."""
    steps: int
    preemptions: int
    evicted_blocks: int
    timeline: list[CapturedStep]

    @property
    def misfits(self) -> int:
        return sum(1 for steps in self.steps_off if steps)


@dataclass(slots=True)
class StepAhead:
    """State of a step after the requests that are surely in it."""

    budget: int
    block_size: int
    sampling: list[tuple[int, int]] = field(default_factory=list)
    """Places of the sampled requests, and the number of the token of each."""
    filled: set[int] = field(default_factory=set)
    """Known keys of blocks that get full in it: requests later in the step hit them."""

    def add(self, request: Request, token: int, depth: int, tokens: int) -> None:
        """Serve a request that has ``depth`` tokens and lacks ``tokens``, as far as the budget goes."""
        share = min(tokens, self.budget)
        self.budget -= share
        if share == tokens > 0:
            self.sampling.append((request.index, token))
        if share > 1:
            full = min((depth + share) // self.block_size, request.num_keys)
            first = request.first_key
            self.filled.update(request.keys[first + block] for block in range(depth // self.block_size, full))


UNSEEN_MS = math.inf


class SeenTimes:
    """Times by place, on the trace's clock, ms."""

    def __init__(self, records: Sequence[Record], requests: Sequence[SimulatedRequest]) -> None:
        self.first_ms = [_first_ms(record) for record in records]
        """Of the first token; ``UNSEEN_MS``: it was not seen."""
        self.every_ms = [_every_ms(record) for record in records]
        """Of every token that came; those that came with later ones in a read are laid between their neighbours."""
        self.left_ms = [
            math.inf if math.isnan(request.abort_after_ms) else request.arrival_ms + request.abort_after_ms
            for request in requests
        ]
        """When the client went away; infinity: it did not."""
        gaps_ms = [gap for record in records for gap in record.itl_ms]
        self.slack_ms = float(np.quantile(gaps_ms, 0.05)) / 2.0 if gaps_ms else 0.5
        """Half of a step as short as they get: what is less apart than this may be of one step."""

    def first_steps(self) -> dict[int, int]:
        """Return by place the number of its first token's step; reads up to ``slack_ms`` apart are of one step."""
        seen = sorted((first_ms, place) for place, first_ms in enumerate(self.first_ms) if first_ms < UNSEEN_MS)
        steps, count, before_ms = {}, -1, -math.inf
        for first_ms, place in seen:
            count += first_ms - before_ms > self.slack_ms
            steps[place], before_ms = count, first_ms
        return steps

    def ends_ms(self, sampling: Sequence[tuple[int, int]], steps: int = 0) -> list[float]:
        """Return the times at which these requests got the token ``steps`` after the given one, where they did."""
        return [
            every_ms[token + steps]
            for place, token in sampling
            if 0 <= token + steps < len(every_ms := self.every_ms[place])
        ]


def seen_tokens(record: Record) -> list[float]:
    """Return the time of each token of ``record``, on the trace's clock; NaN for a token read with later ones."""
    later = sum(record.itl_tokens)
    misread = len(record.itl_ms) != len(record.itl_tokens) or later > MOST_TOKENS
    if record.arrival_ms is None or record.ttft_ms is None or misread:
        return []
    reads_ms = record.arrival_ms + np.cumsum([record.ttft_ms, *record.itl_ms])
    sizes = [max(1, (record.output_tokens or later + 1) - later), *record.itl_tokens]
    times: list[float] = []
    for size, read_ms in zip(sizes, reads_ms.tolist(), strict=True):
        times += [float("nan")] * (size - 1) + [read_ms] * min(size, 1)
    return times


def _first_ms(record: Record) -> float:
    if record.ttft_ms is None or record.arrival_ms is None:
        return UNSEEN_MS
    return record.arrival_ms + record.ttft_ms


def _every_ms(record: Record) -> list[float]:
    times_ms = seen_tokens(record)
    if not times_ms and record.status == "ok" and record.output_tokens and (end_ms := record.end_ms()) is not None:
        # Not streamed: all that is known of its tokens is when the last had come.
        times_ms = [math.nan] * (record.output_tokens - 1) + [end_ms]
    known = [place for place, time_ms in enumerate(times_ms) if not math.isnan(time_ms)]
    if len(known) == len(times_ms) or record.arrival_ms is None:
        return times_ms
    places, seen = [-1, *known], [record.arrival_ms, *(times_ms[place] for place in known)]
    filled: list[float] = np.interp(range(len(times_ms)), places, seen).tolist()
    return filled
