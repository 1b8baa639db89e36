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

from sim.fit.schedule import UNSEEN_MS, Admitted, CapturedStep, Reconstruction, SeenTimes, StepAhead
from sim.latency.terms import step_row
from sim.vllm.config import EngineConfig
from sim.vllm.hybrid import make_scheduler
from sim.vllm.pool import BlockPool
from sim.vllm.rules import lookup_limit
from sim.vllm.scheduler import Scheduler, Step
from sim.workload.arrivals import Arrival

MOST_ROUNDS = 8
PATIENCE = 2
"""Rounds in a row that make nothing better before it is left as it is."""


class CapturedSchedule:
    """A run over ``arrivals``, which must not wait for each other.

    ``shifted``: by place, steps by which a request is admitted later than its first token says (negative: sooner, if it
    had arrived by then), to correct the estimate. ``pool``: a pool with its own hits.
    """

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        config: EngineConfig,
        shifted: Mapping[int, int] | None = None,
        *,
        pool: BlockPool | None = None,
    ) -> None:
        self.scheduler = make_scheduler(config) if pool is None else Scheduler(config)
        if pool is not None:
            self.scheduler.pool = pool
        self._outcomes = [Admitted(arrival) for arrival in arrivals]
        self._seen = SeenTimes(arrivals)
        self._left = dict(shifted or {})
        self._now_ms = -math.inf
        self._planned_ms = -math.inf
        self._step_ends_ms: list[float] = []
        self._timeline: list[CapturedStep] = []
        self._opener: int | None = None
        self._composed: deque[tuple[list[tuple[int, int]], int | None]] = deque()
        self._first_step: dict[int, int] = {}
        self._preemptions = 0
        self._pending = self._in_line(arrivals)
        self._leaving = sorted(range(len(arrivals)), key=lambda place: -self._seen.left_ms[place])

    def run(self) -> Reconstruction:
        composed: Step | None = None
        while True:
            step = composed or self._compose(at_rest=True)
            if step is None:
                if not self._wait():
                    break
                continue
            end_ms = self._planned_ms
            composed = self._compose(at_rest=False) if self.scheduler.config.async_scheduling else None
            self._finish(step, end_ms)
        for place, outcome in enumerate(self._outcomes):
            if outcome.request is not None:
                outcome.cached_tokens = outcome.request.cached_tokens
                outcome.preemptions = outcome.request.preemptions
            outcome.steps_off = self._steps_off(place)
        return Reconstruction(
            self._outcomes,
            len(self._step_ends_ms),
            self._preemptions,
            self.scheduler.pool.evicted_blocks,
            self._timeline,
        )

    def _in_line(self, arrivals: Sequence[Arrival]) -> list[int]:
        """Places of requests that the engine got, last admitted first: FCFS; without a seen token, by arrival."""
        steps = self._seen.first_steps()
        order = sorted(range(len(arrivals)), key=lambda place: arrivals[place].arrival_ms)
        ranks, latest = {}, -1
        for place in order:
            latest = max(latest, steps.get(place, latest))
            ranks[place] = steps.get(place, latest)
        runs = [place for place in order if arrivals[place].kind == "runs"]
        return sorted(runs, key=lambda place: ranks[place])[::-1]

    def _compose(self, *, at_rest: bool) -> Step | None:
        while self._leaving and self._seen.left_ms[self._leaving[-1]] <= self._now_ms:
            self._leave(self._leaving.pop())
        self._enter()
        if not self.scheduler.has_work:
            return None
        step = self.scheduler.schedule_at_rest() if at_rest else self.scheduler.schedule()
        self._preemptions += len(step.preempted)
        for request in step.admitted:
            outcome = self._outcomes[request.index]
            outcome.admitted_ms = self._now_ms if outcome.admitted_ms is None else outcome.admitted_ms
        if not step.scheduled:
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
        self._timeline.append(
            CapturedStep(
                start_ms,
                self._now_ms,
                step_row(step, step_end_ms),
                sampling,
                max(step.scheduled, key=lambda share: share.num_tokens).request.index,
                opener,
                len(step.admitted) < len(step.scheduled),
            )
        )
        for share in step.scheduled:
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
        arrival_ms = self._outcomes[place].arrival.arrival_ms
        if self._add(place) and arrival_ms >= self._now_ms:
            self._opener = place
        self._now_ms = self._planned_ms = max(self._now_ms, arrival_ms)
        return True

    def _leave(self, place: int) -> None:
        if place in self._pending:
            self._pending.remove(place)
        request = self._outcomes[place].request
        if request is not None and request.state != "finished":
            self.scheduler.abort(request)

    def _add(self, place: int) -> bool:
        arrival = self._outcomes[place].arrival
        request = arrival.request(place)
        if not self.scheduler.accepts(request):
            return False
        self._outcomes[place].request = request
        self.scheduler.add(request)
        return True

    def _enter(self) -> None:
        ahead = self._share_out()
        seats = self.scheduler.config.max_num_seqs - len(self.scheduler.running) - len(self.scheduler.waiting)
        while self._pending and ahead.budget > 0 and seats > 0:
            place = self._pending[-1]
            if self._is_to_come(place, ahead):
                break
            arrival = self._outcomes[place].arrival
            depth = self._hit_tokens(arrival.hashes, arrival.prompt_tokens, ahead, arrival.unread)
            if not self._is_due(place, arrival.prompt_tokens - depth, ahead):
                break
            self._pending.pop()
            if self._add(place):
                ahead.add(place, 0, arrival.hashes, depth, arrival.prompt_tokens - depth)
                seats -= 1

    def _share_out(self) -> StepAhead:
        scheduler = self.scheduler
        ahead = StepAhead(scheduler.config.max_num_batched_tokens, scheduler.config.block_size)
        for request in scheduler.running:
            token, depth = request.num_generated + request.placeholders, request.num_computed
            ahead.add(request.index, token, request.hashes, depth, scheduler.lacking(request))
        for request in scheduler.waiting:
            depth = self._hit_tokens(request.hashes, request.num_tokens, ahead, request.prompt_logprobs)
            ahead.add(request.index, request.num_generated, request.hashes, depth, request.num_tokens - depth)
        return ahead

    def _hit_tokens(self, hashes: Sequence[int], tokens: int, ahead: StepAhead, unread: bool) -> int:
        """Prompt tokens that are cached, or will be by an earlier request of the step."""
        pool = self.scheduler.pool
        most = lookup_limit(tokens, self.scheduler.config.block_size, int(unread))
        hits = len(pool.lookup(hashes, most))
        while hits < most and (hashes[hits] in ahead.filled or pool.lookup(hashes[hits : hits + 1], 1)):
            hits += 1
        return hits * self.scheduler.config.block_size

    def _is_to_come(self, place: int, ahead: StepAhead) -> bool:
        """True if a request arrives after the step ``ahead``: it is not due, however many tokens it would hit."""
        arrival_ms, later = self._outcomes[place].arrival.arrival_ms, self._left.get(place, 0)
        if arrival_ms <= self._now_ms or later < 0:
            return False
        ends_ms = self._seen.ends_ms(ahead.sampling, -later)
        return not ends_ms or arrival_ms >= median(ends_ms)

    def _is_due(self, place: int, tokens: int, ahead: StepAhead) -> bool:
        """True if a request with ``tokens`` to compute is in the step ``ahead``: its first token comes no sooner."""
        arrival_ms, first_ms = self._outcomes[place].arrival.arrival_ms, self._seen.first_ms[place]
        most = max(1, self.scheduler.config.max_num_batched_tokens - len(ahead.sampling))
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
        came = self._outcomes[place].arrival.arrival_ms <= self._now_ms
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
        longest = max(step.scheduled, key=lambda share: share.num_tokens)
        request, first_ms = longest.request, self._seen.first_ms[longest.request.index]
        if not self._planned_ms < first_ms < UNSEEN_MS:
            return self._planned_ms
        share = longest.num_tokens / (request.num_tokens - longest.depth)
        return self._planned_ms + share * (first_ms - self._planned_ms)


def _sampling(step: Step) -> list[tuple[int, int]]:
    """Places and tokens that a step samples, before the next step is composed."""
    return [
        (share.request.index, share.request.num_generated + share.request.placeholders - 1)
        for share in step.scheduled
        if share.samples
    ]


def reconstruct(
    arrivals: Sequence[Arrival], config: EngineConfig, make_pool: Callable[[], BlockPool | None] = lambda: None
) -> Reconstruction:
    """Return the schedule that fits the capture best; ``make_pool``: a fresh pool per attempt, None: the engine's own.

    A request whose first token is some steps off is admitted as much sooner or later, as long as that helps.
    """
    shifted: dict[int, int] = {}
    best: Reconstruction | None = None
    since_best = 0
    for _ in range(MOST_ROUNDS):
        found = CapturedSchedule(arrivals, config, shifted, pool=make_pool()).run()
        since_best += 1
        if best is None or found.misfits < best.misfits:
            best, since_best = found, 0
        if not found.misfits or since_best == PATIENCE:
            break
        for place, outcome in enumerate(found.outcomes):
            shifted[place] = shifted.get(place, 0) + outcome.steps_off
    assert best is not None
    return best
