"""Step loop in plain Python: arrivals, scheduler steps, clock; the compiled loop equals it bit for bit."""

import heapq
from collections.abc import Sequence

import numpy as np

from sim.latency.modelfile import Model
from sim.latency.noise import frontend_factors
from sim.latency.stepcost import NUM_ROW_TERMS, NUM_STEP_TERMS
from sim.vllm.config import EngineConfig
from tests.sim.oracles.arrival import Arrival
from tests.sim.oracles.readable.hybrid import make_scheduler
from tests.sim.oracles.readable.noise import StepNoise
from tests.sim.oracles.readable.pool import BlockPool
from tests.sim.oracles.readable.request import Request
from tests.sim.oracles.readable.rows import (
    FrontendClock,
    begin_row,
    count_decodes,
    delivery_ms,
    reception_ms,
    row_ms,
    step_row,
)
from tests.sim.oracles.readable.scheduler import Step
from tests.sim.oracles.shared_core import SharedCore
from tests.sim.oracles.simulation import RequestRun, Simulation, Timeline

_ENTER, _ABORT = 0, 1


class Engine:
    """One run. ``seed`` None: no draws, the noise's medians. ``pool``: one that decides hits in its own way."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        config: EngineConfig,
        model: Model,
        *,
        seed: int | None = None,
        pool: BlockPool | None = None,
        fast_forward: bool = True,
    ) -> None:
        self.scheduler = make_scheduler(config)
        if pool is not None:
            self.scheduler.pool = pool
        self.timeline = Timeline()
        self.now_ms = min((arrival.arrival_ms for arrival in arrivals), default=0.0)
        self.now_ms = min(self.now_ms, 0.0)
        self._costs = model.costs
        self._noise = StepNoise(model.noise, seed)
        self._frontend_factors: list[float] = frontend_factors(
            model.noise, seed, [arrival.record.request_id for arrival in arrivals]
        ).tolist()
        self._skips = fast_forward and not config.async_scheduling and config.kv_groups is None
        self._composes_ahead = config.async_scheduling
        self._runs = [RequestRun(arrival, arrival.arrival_ms) for arrival in arrivals]
        self._children: dict[int, list[int]] = {}
        self._arrivals: list[tuple[float, int]] = []
        self._events: list[tuple[float, int, int]] = []
        self._core = SharedCore() if model.frontend_placement == "shared_core" else None
        self._composed: Step | None = None
        self._frontend_clock = FrontendClock(model.frontend_placement)
        self._step_end_ms = float("-inf")
        self._carried_ms = 0.0
        """What the front end on the shared core still has to do of a first token's delivery, beside the next step."""
        self._preemptions = 0
        for position, arrival in enumerate(arrivals):
            if arrival.parent is None:
                heapq.heappush(self._arrivals, (arrival.arrival_ms, position))
            else:
                self._children.setdefault(arrival.parent, []).append(position)

    def run(self) -> Simulation:
        """Run until all requests have ended."""
        while True:
            self._deliver_events()
            step = self._composed or self._compose(is_idle=True)
            if step is None:
                if not self._idle():
                    break
                continue
            self._composed = self._compose(is_idle=False) if self._composes_ahead else None
            self._run_step(step)
            if self._skips:
                self._skip_decodes(step)
        return Simulation(
            self._runs, self.timeline, self.scheduler.stats, self._preemptions, self.scheduler.config.block_size
        )

    def _compose(self, *, is_idle: bool) -> Step | None:
        """Return the next scheduler step; None: nothing to compute. ``is_idle``: no step runs."""
        if not self.scheduler.has_work:
            return None
        step = self.scheduler.schedule_when_idle() if is_idle else self.scheduler.schedule()
        self._preemptions += len(step.preempted)
        for request in step.admitted:
            request_run = self._runs[request.index]
            request_run.admitted_ms = self.now_ms if request_run.admitted_ms is None else request_run.admitted_ms
        return step if step.scheduled else None

    def _run_step(self, step: Step) -> None:
        """Move the clock over ``step``; its tokens appear at its end."""
        sampled = [share.request for share in step.scheduled if share.samples and share.request.state != "finished"]
        self._advance(step_row(step, self._step_end_ms))
        last = len(self.timeline) - 1
        finished = self.scheduler.finish_step(step)
        firsts = [request.prompt_tokens for request in sampled if not self._runs[request.index].token_steps]
        if firsts:
            self._deliver(sum(firsts))
        for request in sampled:
            self._runs[request.index].token_steps.append(last)
        for request in finished:
            self._end(request.index, "ok")

    def _deliver(self, prompt_tokens: int) -> None:
        """The last step has first tokens of prompts of so many together: all of its tokens are seen as much later. On
        a shared core the engine, if it goes on, takes half of it meanwhile."""
        work_ms = delivery_ms(self._costs, prompt_tokens)
        shared = self._core is not None and (self._composed is not None or self.scheduler.has_work)
        self._carried_ms = work_ms if shared else 0.0
        self.timeline.delay(self.now_ms + work_ms + self._carried_ms)

    def _idle(self) -> bool:
        """Advance the clock of the idle engine to the next event; False: no event."""
        if self._core is not None and self._core.is_busy:
            start_ms = self.now_ms
            row = [0.0] * NUM_ROW_TERMS
            self.now_ms = self._core.run_alone(start_ms, self._next_ms(), row)
            self.timeline.append(start_ms, self.now_ms, row)
            self._hand_over()
            return True
        next_ms = self._next_ms()
        self.now_ms = max(self.now_ms, next_ms)
        return next_ms < float("inf")

    def _advance(self, row: list[float]) -> None:
        """Move the clock over a step of ``row``, and the front end with it on a shared core."""
        start_ms, step_ms = self.now_ms, row_ms(self._costs, row)
        step_ms = step_ms * self._noise.factor(start_ms, step_ms) + self._carried_ms
        self._carried_ms = 0.0
        if self._core is not None:
            row += [0.0] * (NUM_ROW_TERMS - NUM_STEP_TERMS)
            self._share_core(step_ms, row)
        else:
            self.now_ms = start_ms + step_ms
        self._step_end_ms = self.now_ms
        self.timeline.append(start_ms, self.now_ms, row)

    def _share_core(self, left_ms: float, row: list[float]) -> None:
        """Run ``left_ms`` of the engine's work beside the front end's, which ``row`` counts."""
        assert self._core is not None
        while left_ms > 0.0:
            self._receive()
            until_ms = self._arrivals[0][0] if self._arrivals else float("inf")
            self.now_ms, left_ms = self._core.run_beside(self.now_ms, left_ms, until_ms, row)
        self._hand_over()

    def _skip_decodes(self, step: Step) -> None:
        """Run, without the scheduler, the steps that would be ``step`` again: only decodes, none of which fills or
        needs a block or ends, and nobody arrives. Blocks stay as they are, so whoever could not be admitted in
        ``step`` cannot be now."""
        running = self.scheduler.running
        if not running or step.preempted or step.admitted or len(step.scheduled) != len(running):
            return
        if self.scheduler.waiting and step.total_tokens != len(running):
            return  # a prefill may have used up the budget that the queue's head waits for
        block_size = self.scheduler.config.block_size
        most = min(_plain_decodes(request, block_size) for request in running)
        if most <= 0:
            return
        first = len(self.timeline)
        kv_tokens, count = sum(request.num_computed for request in running), 0
        while count < most and self.now_ms < self._wake_ms():
            row = [0.0] * NUM_STEP_TERMS
            begin_row(row)
            count_decodes(row, len(running), kv_tokens, step.repeated_tokens)
            self._advance(row)
            kv_tokens += len(running)
            count += 1
        for request in running:
            request.num_tokens += count
            request.num_computed += count
            self._runs[request.index].token_steps.extend(range(first, first + count))

    def _at(self, time_ms: float, kind: int, position: int) -> None:
        heapq.heappush(self._events, (time_ms, kind, position))

    def _next_ms(self) -> float:
        """Return the time of the next event; infinity: no event."""
        arrival_ms = self._arrivals[0][0] if self._arrivals else float("inf")
        return min(arrival_ms, self._events[0][0]) if self._events else arrival_ms

    def _wake_ms(self) -> float:
        """When something next happens that the scheduler must see; on a shared core, an arrival alone is not it."""
        if self._core is None:
            return self._next_ms()
        return self._events[0][0] if self._events else float("inf")

    def _deliver_events(self) -> None:
        """Deliver all events up to now, in order."""
        while self._next_ms() <= self.now_ms:
            if not self._events or (self._arrivals and self._arrivals[0][0] <= self._events[0][0]):
                self._arrive(*heapq.heappop(self._arrivals))
                continue
            time_ms, kind, position = heapq.heappop(self._events)
            if kind == _ENTER:
                self._enter(position, time_ms)
            else:
                self._abort(position)

    def _receive(self) -> None:
        """Arrivals by now, while a step runs."""
        while self._arrivals and self._arrivals[0][0] <= self.now_ms:
            self._arrive(*heapq.heappop(self._arrivals))

    def _hand_over(self) -> None:
        """Queue the requests that the API server on the shared core has received."""
        assert self._core is not None
        for time_ms, position in self._core.pop_done():
            self._at(time_ms, _ENTER, position)

    def _arrive(self, time_ms: float, position: int) -> None:
        request_run = self._runs[position]
        arrival = request_run.arrival
        request_run.arrival_ms = time_ms
        if arrival.kind == "as_recorded":
            request_run.e2e_ms = arrival.record.e2e_ms
            self._end(position, "as_recorded")
            return
        request = request_of(arrival, position, time_ms)
        if not self.scheduler.accepts(request):
            request_run.e2e_ms = self._work_ms(position)
            self._end(position, "unservable")
            return
        request_run.request = request
        if self._core is None:
            self._at(self._frontend_clock.entry_ms(time_ms, self._work_ms(position)), _ENTER, position)
        else:
            self._core.accept(position, arrival.prompt_tokens, self._work_ms(position))
        if arrival.abort_after_ms is not None:
            self._at(time_ms + arrival.abort_after_ms, _ABORT, position)

    def _work_ms(self, position: int) -> float:
        """Return the API server's time for a request, with its noise factor."""
        return reception_ms(self._costs, self._runs[position].arrival.prompt_tokens) * self._frontend_factors[position]

    def _enter(self, position: int, time_ms: float) -> None:
        request_run = self._runs[position]
        if request_run.outcome is None and request_run.request is not None:
            request_run.entry_ms = time_ms
            self.scheduler.add(request_run.request)

    def _abort(self, position: int) -> None:
        request_run = self._runs[position]
        if request_run.outcome is not None or request_run.request is None:
            return
        if request_run.entry_ms is not None:
            self.scheduler.abort(request_run.request)
        self._end(position, "aborted")

    def _end(self, position: int, outcome: str) -> None:
        """Record the client's latencies, and schedule the next turns."""
        request_run = self._runs[position]
        left_ms = request_run.arrival_ms + (request_run.arrival.abort_after_ms or 0.0)
        delivered_ms = self.timeline.delivered_ms
        if (
            outcome == "ok"
            and request_run.arrival.abort_after_ms is not None
            and delivered_ms[request_run.token_steps[-1]] > left_ms
        ):
            outcome = "aborted"  # its last token was generated after the client disconnected
        request_run.outcome = outcome
        if outcome == "aborted":
            request_run.token_steps = [step for step in request_run.token_steps if delivered_ms[step] <= left_ms]
        if request_run.token_steps:
            self._see_tokens(request_run)
        if outcome == "aborted":
            request_run.e2e_ms = request_run.arrival.abort_after_ms
        end_ms = request_run.arrival_ms + (request_run.e2e_ms or 0.0)
        failed = outcome in {"unservable", "parent_failed"}
        for child in self._children.get(position, ()):
            arrival_ms = end_ms + self._runs[child].arrival.think_ms
            if failed:
                self._runs[child].arrival_ms = arrival_ms
                self._end(child, "parent_failed")
            else:
                heapq.heappush(self._arrivals, (arrival_ms, child))

    def _see_tokens(self, request_run: RequestRun) -> None:
        """Set TTFT, ITL and E2E latency as the client sees them."""
        delivered_ms = np.array([self.timeline.delivered_ms[step] for step in request_run.token_steps])
        request_run.ttft_ms = float(delivered_ms[0] - request_run.arrival_ms)
        request_run.itl_ms = np.diff(delivered_ms)
        request_run.e2e_ms = float(delivered_ms[-1] - request_run.arrival_ms)


def _plain_decodes(request: Request, block_size: int) -> int:
    """Steps in which ``request`` only decodes: its last block neither fills nor overflows, and it does not end."""
    lacking = request.num_tokens - request.num_computed
    into_block = request.num_computed % block_size
    if lacking != 1 or into_block == 0 or request.num_computed < request.prompt_tokens:
        return 0
    return min(block_size - 1 - into_block, request.last_token - request.num_tokens - 1)


def request_of(arrival: Arrival, position: int, arrival_ms: float | None = None) -> Request:
    return Request(
        arrival.record.request_id,
        arrival.prompt_tokens,
        arrival.output_tokens,
        list(arrival.hashes),
        arrival.arrival_ms if arrival_ms is None else arrival_ms,
        position,
        prompt_logprobs=arrival.hit_limit == 0,
    )
