"""Schedule of a capture: scheduler steps, each request's progress, and read times of tokens."""

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
    """Scheduler step of a capture. Times in ms on the trace clock; approximate without a token read."""

    start_ms: float
    end_ms: float
    row: StepRow
    sampling: list[tuple[int, int]]
    """Index and token number of each sampled request."""
    largest: int
    opener: int | None
    """Index of the request whose arrival ended an idle time: a lower bound of the start. None: follows another step."""
    continues: bool
    """Has requests of earlier steps. False: all may have been in the API server at the earliest start."""


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """Reconstructed schedule; ``requests`` are in the order of the capture's records."""

    requests: list[SimulatedRequest]
    """``has_arrived``: accepted by the engine."""
    steps_off: list[int]
    """Steps by request by which the first token was read after its scheduled step; negative: before."""
    steps: int
    preemptions: int
    evicted_blocks: int
    timeline: list[CapturedStep]

    @property
    def misfits(self) -> int:
        return sum(1 for steps in self.steps_off if steps)


@dataclass(slots=True)
class StepAhead:
    """Next scheduler step: token budget and requests already in the step."""

    budget: int
    block_size: int
    sampling: list[tuple[int, int]] = field(default_factory=list)
    """Index and token number of each sampled request."""
    filled: set[int] = field(default_factory=set)
    """Keys of blocks that the step fills: prefix hits of later requests in the step."""

    def add(self, request: Request, token: int, depth: int, tokens: int) -> None:
        """Schedule a request with ``depth`` computed tokens and ``tokens`` to compute, within the token budget."""
        share = min(tokens, self.budget)
        self.budget -= share
        if share == tokens > 0:
            self.sampling.append((request.index, token))
        if share > 1:
            full = min((depth + share) // self.block_size, request.num_keys)
            first = request.first_key
            self.filled.update(request.keys[first + block] for block in range(depth // self.block_size, full))


UNSEEN_MS = math.inf


class TokenTimes:
    """Read times of tokens by request index, in ms on the trace clock."""

    def __init__(self, records: Sequence[Record], requests: Sequence[SimulatedRequest]) -> None:
        self.first_ms = [_first_ms(record) for record in records]
        """First token; ``UNSEEN_MS``: not read."""
        self.every_ms = [_every_ms(record) for record in records]
        """All tokens; tokens read together with later tokens are interpolated."""
        self.abort_ms = [
            math.inf if math.isnan(request.abort_after_ms) else request.arrival_ms + request.abort_after_ms
            for request in requests
        ]
        """Client abort; infinity: none."""
        gaps_ms = [gap for record in records for gap in record.itl_ms]
        self.slack_ms = float(np.quantile(gaps_ms, 0.05)) / 2.0 if gaps_ms else 0.5
        """Half of a short step: reads within it may be of the same step."""

    def first_steps(self) -> dict[int, int]:
        """Return the step number of first tokens by request; reads within ``slack_ms`` are of the same step."""
        first_tokens = sorted((first_ms, index) for index, first_ms in enumerate(self.first_ms) if first_ms < UNSEEN_MS)
        steps, count, before_ms = {}, -1, -math.inf
        for first_ms, index in first_tokens:
            count += first_ms - before_ms > self.slack_ms
            steps[index], before_ms = count, first_ms
        return steps

    def ends_ms(self, sampling: Sequence[tuple[int, int]], steps: int = 0) -> list[float]:
        """Return the times of the tokens ``steps`` after the sampled tokens, as far as they exist."""
        return [
            every_ms[token + steps]
            for index, token in sampling
            if 0 <= token + steps < len(every_ms := self.every_ms[index])
        ]


def token_times(record: Record) -> list[float]:
    """Return the read time of each token of ``record`` on the trace clock; NaN: read together with later tokens."""
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
    times_ms = token_times(record)
    if not times_ms and record.status == "ok" and record.output_tokens and (end_ms := record.end_ms()) is not None:
        # Not streamed: only the time of the last token is known.
        times_ms = [math.nan] * (record.output_tokens - 1) + [end_ms]
    timed = [index for index, time_ms in enumerate(times_ms) if not math.isnan(time_ms)]
    if len(timed) == len(times_ms) or record.arrival_ms is None:
        return times_ms
    indexes, times = [-1, *timed], [record.arrival_ms, *(times_ms[index] for index in timed)]
    filled: list[float] = np.interp(range(len(times_ms)), indexes, times).tolist()
    return filled
