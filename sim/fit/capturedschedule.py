"""Schedule of a captured engine: the scheduler's rules, fitted to the times at which tokens were read.

A step that samples ends when its tokens were read. A request is admitted in the step that gives its first token its
measured time, so no latency model is needed. The end of a step without a token (a prefill chunk while no request
decodes) is interpolated by its share of the prompt tokens. Reported cached tokens are ignored.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from measure.cache.vectors import floats
from sim.engine.columns import RequestColumns
from sim.engine.simulation import make_scheduler
from sim.fit.schedule import UNSEEN_MS, CapturedStep, Reconstruction, StepAhead, TokenTimes
from sim.latency.stepcost import NUM_STEP_TERMS, NUM_TERMS, StepCost
from sim.vllm.config import EngineConfig
from sim.vllm.kvcache import SingleGroupCache
from sim.vllm.request import Request
from sim.vllm.scheduler import Step
from tracefile.records.schema import Record

MOST_ROUNDS = 8
PATIENCE = 2
"""Rounds without fewer misfits after which the search stops."""


class CapturedSchedule:
    """Scheduler run over the requests of ``columns``, which must not wait for each other; ``records``: their records.

    ``shifted``: by request index, scheduler steps by which admission is later than the first token implies (negative:
    earlier, not before arrival). ``cache``: a KV cache that replaces the engine's.
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
        self._token_times = TokenTimes(records, self._requests)
        self._remaining_shifts = dict(shifted or {})
        self._now_ms = -math.inf
        self._planned_ms = -math.inf
        self._step_ends_ms: list[float] = []
        self._timeline: list[CapturedStep] = []
        self._opener: int | None = None
        self._composed: deque[tuple[list[tuple[int, int]], int | None]] = deque()
        self._first_step: dict[int, int] = {}
        self._preemptions = 0
        self._pending = self._fcfs_order()
        self._aborts = sorted(range(len(records)), key=lambda index: -self._token_times.abort_ms[index])

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
            [self._steps_off(index) for index in range(len(self._requests))],
            len(self._step_ends_ms),
            self._preemptions,
            self.scheduler.cache.evicted_blocks(),
            self._timeline,
        )

    def _fcfs_order(self) -> list[int]:
        """Return request indexes in reverse admission order (FCFS); without a token, by arrival."""
        steps = self._token_times.first_steps()
        requests = self._requests
        order = sorted(range(len(requests)), key=lambda index: requests[index].arrival_ms)
        ranks, latest = {}, -1
        for index in order:
            latest = max(latest, steps.get(index, latest))
            ranks[index] = steps.get(index, latest)
        runs = [index for index in order if not requests[index].is_as_recorded]
        return sorted(runs, key=lambda index: ranks[index])[::-1]

    def _compose(self, step: Step, *, is_idle: bool) -> Step | None:
        while self._aborts and self._token_times.abort_ms[self._aborts[-1]] <= self._now_ms:
            self._abort(self._aborts.pop())
        self._admit_due()
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

    def _steps_off(self, index: int) -> int:
        step, first_ms = self._first_step.get(index), self._token_times.first_ms[index]
        if (
            step is None
            or first_ms == UNSEEN_MS
            or abs(self._step_ends_ms[step] - first_ms) <= self._token_times.slack_ms
        ):
            return 0
        after = bisect_left(self._step_ends_ms, first_ms)
        around = [near for near in (after - 1, after) if 0 <= near < len(self._step_ends_ms)]
        return min(around, key=lambda near: abs(self._step_ends_ms[near] - first_ms)) - step

    def _wait(self) -> bool:
        """Advance the idle scheduler to the next arrival; False if there is none."""
        if not self._pending:
            return False
        index = self._pending.pop()
        arrival_ms = self._requests[index].arrival_ms
        if self._add(index) and arrival_ms >= self._now_ms:
            self._opener = index
        self._now_ms = self._planned_ms = max(self._now_ms, arrival_ms)
        return True

    def _abort(self, index: int) -> None:
        if index in self._pending:
            self._pending.remove(index)
        if self._requests[index].has_arrived:
            self.scheduler.abort(self._requests[index])

    def _add(self, index: int) -> bool:
        request = self._requests[index]
        request.has_arrived = self.scheduler.accepts(request)
        if request.has_arrived:
            self.scheduler.add(request)
        return request.has_arrived

    def _admit_due(self) -> None:
        ahead = self._step_ahead()
        seats = self.config.max_num_seqs - len(self.scheduler.running) - len(self.scheduler.waiting)
        while self._pending and ahead.budget > 0 and seats > 0:
            index = self._pending[-1]
            if self._arrives_later(index, ahead):
                break
            request = self._requests[index]
            depth = self._hit_tokens(request, ahead)
            if not self._is_due(index, request.prompt_tokens - depth, ahead):
                break
            self._pending.pop()
            if self._add(index):
                ahead.add(request, 0, depth, request.prompt_tokens - depth)
                seats -= 1

    def _step_ahead(self) -> StepAhead:
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
        """Return the prefix hit in tokens, with blocks that an earlier request of the step fills."""
        size = self.config.block_size
        hits = self.scheduler.cache.look_up(request) // size
        most = min((request.num_tokens - 1) // size, request.hit_limit, request.num_keys)
        while hits < most and request.keys[request.first_key + hits] in ahead.filled:
            hits += 1
        return hits * size

    def _arrives_later(self, index: int, ahead: StepAhead) -> bool:
        """Return if a request arrives after step ``ahead`` and cannot be scheduled in the step."""
        arrival_ms, later = self._requests[index].arrival_ms, self._remaining_shifts.get(index, 0)
        if arrival_ms <= self._now_ms or later < 0:
            return False
        ends_ms = self._token_times.ends_ms(ahead.sampling, -later)
        return not ends_ms or arrival_ms >= median(ends_ms)

    def _is_due(self, index: int, tokens: int, ahead: StepAhead) -> bool:
        """Return if a request with ``tokens`` to prefill is in step ``ahead``, by the time of its first token."""
        arrival_ms, first_ms = self._requests[index].arrival_ms, self._token_times.first_ms[index]
        most = max(1, self.config.max_num_batched_tokens - len(ahead.sampling))
        more = -(-(tokens - ahead.budget) // most)
        later = self._remaining_shifts.get(index, 0)
        ends_ms = self._token_times.ends_ms(ahead.sampling, more - later) if first_ms < UNSEEN_MS else []
        if not ends_ms:
            # No request decodes for so long: steps without a token lie between, with approximate ends.
            return self._has_arrived(index, later)
        end_ms = median(ends_ms)
        nexts_ms = [
            next_ms for next_ms in self._token_times.ends_ms(ahead.sampling, more - later + 1) if next_ms > end_ms
        ]
        until_ms = (end_ms + min(nexts_ms)) / 2.0 if nexts_ms else end_ms + self._token_times.slack_ms
        has_arrived = arrival_ms <= self._now_ms or (arrival_ms < end_ms and (not more or later < 0))
        return has_arrived and first_ms <= until_ms

    def _has_arrived(self, index: int, later: int) -> bool:
        if later < 0:
            return True
        has_arrived = self._requests[index].arrival_ms <= self._now_ms
        if has_arrived and later > 0:
            self._remaining_shifts[index] = later - 1
        return has_arrived and later == 0

    def _end_of(self, step: Step, sampling: Sequence[tuple[int, int]]) -> float:
        """Return the end of ``step``: median of its tokens' times; without tokens, its share of the prefill."""
        if ends_ms := self._token_times.ends_ms(sampling):
            return max(self._planned_ms, median(ends_ms))
        if sampling:
            # All sampled requests were aborted before the client read the token.
            abort_ms = min(self._token_times.abort_ms[index] for index, _ in sampling)
            return max(self._planned_ms, abort_ms) if abort_ms < math.inf else self._planned_ms
        longest = max(step.shares[: step.count], key=lambda share: share.num_tokens)
        request, first_ms = longest.request, self._token_times.first_ms[longest.request.index]
        if not self._planned_ms < first_ms < UNSEEN_MS:
            return self._planned_ms
        share = int(longest.num_tokens) / int(request.num_tokens - longest.depth)
        return self._planned_ms + share * (first_ms - self._planned_ms)


def _sampling(step: Step) -> list[tuple[int, int]]:
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
    """Return the schedule that fits the capture best; ``make_cache``: new KV cache per attempt, None: the engine's.

    Requests whose first token is off by some scheduler steps are admitted as much earlier or later while that helps.
    """
    shifted: dict[int, int] = {}
    best: Reconstruction | None = None
    since_best = 0
    for _ in range(MOST_ROUNDS):
        schedule = CapturedSchedule(records, columns, config, shifted, cache=make_cache()).run()
        since_best += 1
        if best is None or schedule.misfits < best.misfits:
            best, since_best = schedule, 0
        if not schedule.misfits or since_best == PATIENCE:
            break
        for index, steps in enumerate(schedule.steps_off):
            shifted[index] = shifted.get(index, 0) + steps
    assert best is not None
    return best
