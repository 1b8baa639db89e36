"""An engine's schedule out of a capture of it: the scheduler's own rules, kept to the times at which tokens were seen.

Every step that samples ends when its tokens were seen, and a request was admitted in the step that makes its first
token come out when it did; so no model of latency is needed. A step without a token (a chunk of a prompt with no
request decoding) is laid in between by its share of the tokens. Reported cached tokens are not looked at.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from measure.cache.vectors import floats
from sim.engine.columns import RequestColumns
from sim.engine.simulation import make_scheduler
from sim.fit.schedule import UNSEEN_MS, CapturedStep, Reconstruction, SeenTimes, StepAhead
from sim.latency.stepcost import NUM_STEP_TERMS, NUM_TERMS, StepCost
from sim.vllm.config import EngineConfig
from sim.vllm.kvcache import SingleGroupCache
from sim.vllm.request import Request
from sim.vllm.scheduler import Step
from tracefile.records.schema import Record

MOST_ROUNDS = 8
PATIENCE = 2
"""Rounds in a row that make nothing better before it is left as it is."""


class CapturedSchedule:
    """A run over the requests of ``columns``, which must not wait for each other. ``records``: theirs.

    ``shifted``: by place, steps by which a request is admitted later than its first token says (negative: sooner, if it
    had arrived by then), to correct the estimate. ``cache``: a KV cache with hits of its own.
    """

    def __init__(
        self,
        records: Sequence[Record],
        columns: RequestColumns,
        config: EngineConfig,
        shifted: Mapping[int, int] | None = None,
        *,
        cache: SingleGroupCache | None = None,
    ) -> None:
        self.config = config
        self.scheduler = make_scheduler(config, cache=cache)
        self._cost = StepCost([0.0] * NUM_TERMS)
        self._steps = (Step(), Step())
        self._requests = columns.make(floats([1.0] * len(records)))
        self._seen = SeenTimes(records, self._requests)
        self._left = dict(shifted or {})
        self._now_ms = -math.inf
        self._planned_ms = -math.inf
        self._step_ends_ms: list[float] = []
        self._timeline: list[CapturedStep] = []
        self._opener: int | None = None
        self._composed: deque[tuple[list[tuple[int, int]], int | None]] = deque()
        self._first_step: dict[int, int] = {}
        self._preemptions = 0
        self._pending = self._in_line()
        self._leaving = sorted(range(len(records)), key=lambda place: -self._seen.left_ms[place])

    def run(self) -> Reconstruction:
        composed: Step | None = None
        while True:
            step = composed or self._compose(self._steps[0], is_idle=True)
            if step is None:
                if not self._wait():
                    break
                continue
            end_ms = self._planned_ms
            other = self._steps[step is self._steps[0]]
            composed = self._compose(other, is_idle=False) if self.config.async_scheduling else None
            self._finish(step, end_ms)
        return Reconstruction(
            self._requests,
            [self._steps_off(place) for place in range(len(self._requests))],
            len(self._step_ends_ms),
            self._preemptions,
            self.scheduler.cache.evicted_blocks(),
            self._timeline,
        )

    def _in_line(self) -> list[int]:
        """Places of requests that the engine got, last admitted first: FCFS; without a seen token, by arrival."""
        steps = self._seen.first_steps()
        requests = self._requests
        order = sorted(range(len(requests)), key=lambda place: requests[place].arrival_ms)
        ranks, latest = {}, -1
        for place in order:
            latest = max(latest, steps.get(place, latest))
            ranks[place] = steps.get(place, latest)
        runs = [place for place in order if not requests[place].is_as_recorded]
        return sorted(runs, key=lambda place: ranks[place])[::-1]

    def _compose(self, step: Step, *, is_idle: bool) -> Step | None:
        while self._leaving and self._seen.left_ms[self._leaving[-1]] <= self._now_ms:
            self._leave(self._leaving.pop())
        self._enter()
        if not self.scheduler.has_work():
            return None
        schedule = self.scheduler.schedule_when_idle if is_idle else self.scheduler.schedule
        self._preemptions += schedule(step)
        for share in step.shares[step.count - step.admitted : step.count]:
            request = self._requests[share.request.index]
            request.admitted_ms = self._now_ms if math.isnan(request.admitted_ms) else request.admitted_ms
        if not step.count:
            return None
        sampling = _sampling(step)
        self._composed.append((sampling, self._opener))
        self._opener = None
        self._planned_ms = self._end_of(step, sampling)
        return step

    def _finish(self, step: Step, end_ms: float) -> None:
        start_ms, self._now_ms = self._now_ms, max(self._now_ms, end_ms)
        step_end_ms = self._timeline[-1].end_ms if self._timeline else -math.inf
        sampling, opener = self._composed.popleft()
        self._cost.count_step(step, step_end_ms)
        scheduled = step.shares[: step.count]
        self._timeline.append(
            CapturedStep(
                start_ms,
                self._now_ms,
                list(self._cost.row)[:NUM_STEP_TERMS],
                sampling,
                max(scheduled, key=lambda share: share.num_tokens).request.index,
                opener,
                step.admitted < step.count,
            )
        )
        for share in scheduled:
            if share.samples and share.request.num_generated == 0:
                self._first_step.setdefault(share.request.index, len(self._step_ends_ms))
        self._step_ends_ms.append(self._now_ms)
        self.scheduler.finish_step(step)

    def _steps_off(self, place: int) -> int:
        step, first_ms = self._first_step.get(place), self._seen.first_ms[place]
        if step is None or first_ms == UNSEEN_MS or abs(self._step_ends_ms[step] - first_ms) <= self._seen.slack_ms:
            return 0
        after = bisect_left(self._step_ends_ms, first_ms)
        around = [near for near in (after - 1, after) if 0 <= near < len(self._step_ends_ms)]
        return min(around, key=lambda near: abs(self._step_ends_ms[near] - first_ms)) - step

    def _wait(self) -> bool:
        """Let the next request arrive, with nothing to compute; False if none will."""
        if not self._pending:
            return False
        place = self._pending.pop()
        arrival_ms = self._requests[place].arrival_ms
        if self._add(place) and arrival_ms >= self._now_ms:
            self._opener = place
        self._now_ms = self._planned_ms = max(self._now_ms, arrival_ms)
        return True

    def _leave(self, place: int) -> None:
        if place in self._pending:
            self._pending.remove(place)
        if self._requests[place].has_arrived:
            self.scheduler.abort(self._requests[place])

    def _add(self, place: int) -> bool:
        request = self._requests[place]
        request.has_arrived = self.scheduler.accepts(request)
        if request.has_arrived:
            self.scheduler.add(request)
        return request.has_arrived

    def _enter(self) -> None:
        ahead = self._share_out()
        seats = self.config.max_num_seqs - len(self.scheduler.running) - len(self.scheduler.waiting)
        while self._pending and ahead.budget > 0 and seats > 0:
            place = self._pending[-1]
            if self._is_to_come(place, ahead):
                break
            request = self._requests[place]
            depth = self._hit_tokens(request, ahead)
            if not self._is_due(place, request.prompt_tokens - depth, ahead):
                break
            self._pending.pop()
            if self._add(place):
                ahead.add(request, 0, depth, request.prompt_tokens - depth)
                seats -= 1

    def _share_out(self) -> StepAhead:
        scheduler = self.scheduler
        ahead = StepAhead(self.config.max_num_batched_tokens, self.config.block_size)
        for request in scheduler.running:
            token, depth = request.num_generated + request.placeholders, request.num_computed
            ahead.add(request, token, depth, scheduler.num_new_tokens(request))
        for request in scheduler.waiting:
            depth = self._hit_tokens(request, ahead)
            ahead.add(request, request.num_generated, depth, request.num_tokens - depth)
        return ahead

    def _hit_tokens(self, request: Request, ahead: StepAhead) -> int:
        """Prompt tokens that are cached, or will be by an earlier request of the step."""
        size = self.config.block_size
        hits = self.scheduler.cache.look_up(request) // size
        most = min((request.num_tokens - 1) // size, request.hit_limit, request.num_keys)
        while hits < most and request.keys[request.first_key + hits] in ahead.filled:
            hits += 1
        return hits * size

    def _is_to_come(self, place: int, ahead: StepAhead) -> bool:
        """True if a request arrives after the step ``ahead``: it is not due, however many tokens it would hit."""
        arrival_ms, later = self._requests[place].arrival_ms, self._left.get(place, 0)
        if arrival_ms <= self._now_ms or later < 0:
            return False
        ends_ms = self._seen.ends_ms(ahead.sampling, -later)
        return not ends_ms or arrival_ms >= median(ends_ms)

    def _is_due(self, place: int, tokens: int, ahead: StepAhead) -> bool:
        """True if a request with ``tokens`` to compute is in the step ``ahead``: its first token comes no sooner."""
        arrival_ms, first_ms = self._requests[place].arrival_ms, self._seen.first_ms[place]
        most = max(1, self.config.max_num_batched_tokens - len(ahead.sampling))
        more = -(-(tokens - ahead.budget) // most)
        later = self._left.get(place, 0)
        ends_ms = self._seen.ends_ms(ahead.sampling, more - later) if first_ms < UNSEEN_MS else []
        if not ends_ms:
            # No request decodes for so long: steps without a token lie between, and their ends are only nearly known.
            return self._came(place, later)
        end_ms = median(ends_ms)
        nexts_ms = [next_ms for next_ms in self._seen.ends_ms(ahead.sampling, more - later + 1) if next_ms > end_ms]
        until_ms = (end_ms + min(nexts_ms)) / 2.0 if nexts_ms else end_ms + self._seen.slack_ms
        came = arrival_ms <= self._now_ms or (arrival_ms < end_ms and (not more or later < 0))
        return came and first_ms <= until_ms

    def _came(self, place: int, later: int) -> bool:
        """True if a request had arrived; a later shift counts down first."""
        if later < 0:
            return True
        came = self._requests[place].arrival_ms <= self._now_ms
        if came and later > 0:
            self._left[place] = later - 1
        return came and later == 0

    def _end_of(self, step: Step, sampling: Sequence[tuple[int, int]]) -> float:
        """Time at which ``step`` ended: of its tokens; without any, by its share of the work before the next token."""
        if ends_ms := self._seen.ends_ms(sampling):
            return max(self._planned_ms, median(ends_ms))
        if sampling:
            # Only of clients that had gone before they could see it.
            left_ms = min(self._seen.left_ms[place] for place, _ in sampling)
            return max(self._planned_ms, left_ms) if left_ms < math.inf else self._planned_ms
        longest = max(step.shares[: step.count], key=lambda share: share.num_tokens)
        request, first_ms = longest.request, self._seen.first_ms[longest.request.index]
        if not self._planned_ms < first_ms < UNSEEN_MS:
            return self._planned_ms
        share = int(longest.num_tokens) / int(request.num_tokens - longest.depth)
        return self._planned_ms + share * (first_ms - self._planned_ms)


def _sampling(step: Step) -> list[tuple[int, int]]:
    """Places and tokens that a step samples, before the next step is composed."""
    return [
        (share.request.index, share.request.num_generated + share.request.placeholders - 1)
        for share in step.shares[: step.count]
        if share.samples
    ]


def reconstruct(
    records: Sequence[Record],
    columns: RequestColumns,
    config: EngineConfig,
    make_cache: Callable[[], SingleGroupCache | None] = lambda: None,
) -> Reconstruction:
    """Return the schedule that fits the capture best; ``make_cache``: a fresh KV cache per attempt, None: the engine's.

    A request whose first token is some steps off is admitted as much sooner or later, as long as that helps.
    """
    shifted: dict[int, int] = {}
    best: Reconstruction | None = None
    since_best = 0
    for _ in range(MOST_ROUNDS):
        found = CapturedSchedule(records, columns, config, shifted, cache=make_cache()).run()
        since_best += 1
        if best is None or found.misfits < best.misfits:
            best, since_best = found, 0
        if not found.misfits or since_best == PATIENCE:
            break
        for place, steps in enumerate(found.steps_off):
            shifted[place] = shifted.get(place, 0) + steps
    assert best is not None
    return best
