"""Step loop of an engine: deliver events, compose a scheduler step, execute it; fast-forward while the batch does not
change. mypyc compiles this module.
"""

from math import inf, isnan
from typing import Final, cast

from librt.vecs import append, extend, vec
from mypy_extensions import i64

from sim.engine.apiserver import SHARED_CORE, ApiServer
from sim.engine.eventheap import EventHeap, push_next_turns
from sim.engine.simulatedrequest import (
    ABORTED,
    AS_RECORDED,
    NO_OUTCOME,
    OK,
    UNSERVABLE,
    SimulatedRequest,
)
from sim.latency.stepcost import StepCost
from sim.latency.stepnoise import StepNoise
from sim.vllm.kvcache import UNLIMITED
from sim.vllm.request import LOADING
from sim.vllm.scheduler import Scheduler, Step
from tracefile.records.errors import InputError

ENTRY: Final = 0
ABORT: Final = 1
LOADED: Final = 2
"""Kinds of events."""
STARTED: Final = 0
ADVANCED: Final = 1
DONE: Final = 2
"""No request is left to arrive or to compute."""
PAUSED: Final = 3
"""The clock has reached the horizon."""
ROUNDING: Final = 1.0 + 1e-9


class Engine:
    """Engine with its API server and scheduler, in virtual time.

    ``composes_ahead``: async scheduling, the next step is composed while a step runs. ``keeps_rows``: record times and
    term counts of every step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: StepCost,
        noise: StepNoise,
        server: ApiServer,
        *,
        composes_ahead: bool,
        now_ms: float = 0.0,
        keeps_rows: bool = False,
    ) -> None:
        self.scheduler: Scheduler = scheduler
        self.server: ApiServer = server
        self.arrivals: EventHeap = EventHeap()
        """Requests to arrive."""
        self.now_ms: float = now_ms
        self.horizon_ms: float = inf
        """Time before which no further request arrives."""
        self.num_steps: i64 = 0
        """Steps in the timeline, including API server work without a scheduler step on a shared core."""
        self.engine_steps: i64 = 0
        self.preemptions: i64 = 0
        self.has_updates: bool = False
        """A request received its first token or ended, since the fleet last looked."""
        self.starts_ms: vec[float] = vec[float]()
        self.ends_ms: vec[float] = vec[float]()
        self.delivered_ms: vec[float] = vec[float]()
        """Times at which clients receive each step's tokens."""
        self.rows: vec[float] = vec[float]()
        self._cost: StepCost = cost
        self._noise: StepNoise = noise
        self._composes_ahead: bool = composes_ahead
        self._keeps_rows: bool = keeps_rows
        self._shares_core: bool = server.placement == SHARED_CORE
        self._events: EventHeap = EventHeap()
        self._steps: tuple[Step, Step] = (Step(), Step())
        self._composed: Step | None = None
        """Composed step that does not run yet."""
        self._running: Step | None = None
        """Running step: started at ``_start_ms``, takes ``_left_ms`` more."""
        self._repeated: Step | None = None
        """Decode step that fast-forward repeats, from step ``_first_repeat`` of the timeline to ``_end_repeat``."""
        self._first_repeat: i64 = 0
        self._end_repeat: i64 = 0
        self._kv_tokens: float = 0.0
        """KV cache tokens that the next repeated step reads."""
        self._start_ms: float = 0.0
        self._left_ms: float = 0.0
        self._delivered_ms: float = -inf
        """Time at which clients receive the last step's tokens."""
        self._carried_ms: float = 0.0
        """Delivery work that continues during the next step, in ms."""
        self._step_end_ms: float = -inf

    def next_ms(self) -> float:
        """Return the time of the next event; infinity: no event."""
        return min(self.arrivals.next_ms, self._events.next_ms)

    def run(self, horizon_ms: float = inf) -> bool:
        """Run scheduler steps up to the horizon; True: all requests have ended.

        Raises InputError if block hashes are not chained.
        """
        self.horizon_ms = horizon_ms
        while True:
            if self._repeated is not None and self._fast_forward_decodes(self._repeated):
                return False
            if self._running is None:
                status = self._start_next_step()
                if status == ADVANCED:
                    continue
                if not self.scheduler.cache.is_chained():
                    raise InputError("block_hashes: a hash occurs at two depths; expected chained hashes")
                if status != STARTED:
                    return status == DONE
            step = self._running
            if step is None or not self._finish_step():
                return False
            self._running = None
            self._deliver_tokens(step)
            again = self._composed if self._composes_ahead else step
            if again is not None:
                self._start_fast_forward(again)

    def resumes_ms(self) -> float:
        """Return the time of the paused engine's next event."""
        if self._running is not None:
            return self.server.resumes_ms
        if self._composed is not None or self.now_ms >= self.horizon_ms:
            return min(self.now_ms, self.next_ms())  # a client may have aborted during the step
        if self.server.is_busy():
            return min(self.next_ms(), self.now_ms + self.server.left_ms())
        return self.next_ms()

    def is_paused(self) -> bool:
        """Return whether the engine is paused inside a scheduler step."""
        return self._running is not None

    def _push_event(self, time_ms: float, kind: i64, request: SimulatedRequest) -> None:
        self._events.push(time_ms, (kind << 40) + request.index, request)

    def _start_next_step(self) -> i64:
        """Compose and start the next scheduler step. Return STARTED, ADVANCED (idle, clock moved), PAUSED or DONE."""
        self._deliver_events()
        if self.now_ms >= self.horizon_ms:
            return PAUSED
        first, second = self._steps
        step = self._composed
        if step is None:
            step = first
            if not self._compose(step, is_idle=True):
                if self._idle():
                    return ADVANCED
                return DONE if self.horizon_ms == inf else PAUSED
        self._composed = None
        other = first if step is second else second
        if self._composes_ahead and self._compose(other, is_idle=False):
            self._composed = other
        self._cost.count_step(step, self._step_end_ms)
        self._start_step(self._cost.step_ms())
        self._running = step
        return STARTED

    def _compose(self, step: Step, *, is_idle: bool) -> bool:
        """Compose the next scheduler step; False: nothing to compute. ``is_idle``: no step runs."""
        scheduler = self.scheduler
        offloading = scheduler.offloading
        if not scheduler.has_work():
            if offloading is not None:
                offloading.touch_finished()  # vLLM runs an empty step after the last request ended
            return False
        if offloading is not None:
            offloading.begin_step(self.now_ms)
        self.preemptions += scheduler.schedule_when_idle(step) if is_idle else scheduler.schedule(step)
        if offloading is not None:
            for loading in offloading.new_loads:
                self._push_event(loading.load_end_ms, LOADED, cast(SimulatedRequest, loading))
            offloading.new_loads.clear()
        for number in range(step.count - step.admitted, step.count):
            request = cast(SimulatedRequest, step.shares[number].request)
            if isnan(request.admitted_ms):
                request.admitted_ms = self.now_ms
        return step.count > 0

    def _start_step(self, step_ms: float) -> None:
        """Start a step with a predicted duration of ``step_ms``, times its noise factor."""
        self._start_ms = self.now_ms
        self._left_ms = step_ms * self._noise.factor(self.now_ms, step_ms) + self._carried_ms
        self._carried_ms = 0.0

    def _finish_step(self) -> bool:
        """Advance the clock to the end of the step, with the API server on a shared core. False: the step paused."""
        if self._shares_core:
            if not self._share_core():
                return False
        else:
            self.now_ms = self._start_ms + self._left_ms
        self._step_end_ms = self.now_ms
        self.engine_steps += 1
        self._record_step(self._start_ms)
        return True

    def _share_core(self) -> bool:
        """Run the step and the API server on one core until the step ends. False: the step paused at the horizon."""
        while self._left_ms > 0.0:
            while self.arrivals.next_ms <= self.now_ms:
                self._handle_arrival()
            until_ms = self.arrivals.next_ms
            self.now_ms, self._left_ms = self.server.run_beside(self.now_ms, self._left_ms, until_ms, self.horizon_ms)
            if self._left_ms > 0.0 and self.now_ms < until_ms:
                return False
        self._queue_received()
        return True

    def _record_step(self, start_ms: float) -> None:
        """Append a step to the timeline; with ``keeps_rows`` also the term counts in the row of ``StepCost``."""
        self._delivered_ms = max(self._delivered_ms, self.now_ms)
        self.delivered_ms = append(self.delivered_ms, self._delivered_ms)
        if self._keeps_rows:
            self.starts_ms = append(self.starts_ms, start_ms)
            self.ends_ms = append(self.ends_ms, self.now_ms)
            self.rows = extend(self.rows, self._cost.row)
        self.num_steps += 1

    def _deliver_tokens(self, step: Step) -> None:
        """Deliver the sampled tokens of the step that ended."""
        last = self.num_steps - 1
        first_tokens: i64 = 0
        for number in range(step.count):
            share = step.shares[number]
            if share.samples:
                request = cast(SimulatedRequest, share.request)
                if not request.is_finished():
                    if request.num_delivered == 0:
                        first_tokens += request.prompt_tokens
                        self.has_updates = True
                    request.add_tokens(last, 1)
        finished = self.scheduler.finish_step(step)
        if first_tokens > 0:
            self._delay_first_tokens(first_tokens)
        for ended in finished:
            self._end(cast(SimulatedRequest, ended), OK)

    def _delay_first_tokens(self, prompt_tokens: i64) -> None:
        """Delay the tokens of the last step by the delivery of first tokens, ``prompt_tokens`` in total. On a shared
        core an engine with work gets half of the core meanwhile."""
        work_ms = self._cost.delivery_ms(prompt_tokens)
        has_work = self._composed is not None or self.scheduler.has_work()
        self._carried_ms = work_ms if has_work and self._shares_core else 0.0
        self._delivered_ms = max(self._delivered_ms, self.now_ms + work_ms + self._carried_ms)
        self.delivered_ms[self.num_steps - 1] = self._delivered_ms

    def _idle(self) -> bool:
        """Advance the clock of the idle engine to the next event; False: no event before the horizon."""
        next_ms = self.next_ms()
        if self.server.is_busy():
            start_ms = self.now_ms
            if min(start_ms + self.server.left_ms(), next_ms) >= self.horizon_ms:
                return False
            self._cost.clear()
            self.now_ms = self.server.run_alone(start_ms, next_ms)
            self._record_step(start_ms)
            self._queue_received()
            return True
        if next_ms >= self.horizon_ms:
            return False
        self.now_ms = max(self.now_ms, next_ms)
        return True

    def _deliver_events(self) -> None:
        """Deliver all events up to now, in order of time; arrivals first at equal times."""
        events = self._events
        while self.next_ms() <= self.now_ms and self.next_ms() < self.horizon_ms:
            if self.arrivals.next_ms <= events.next_ms:
                self._handle_arrival()
                continue
            time_ms = events.next_ms
            kind = events.next_code >> 40
            request = events.pop()
            if kind == ENTRY:
                if request.outcome == NO_OUTCOME:
                    request.entry_ms = time_ms
                    self.scheduler.add(request)
            elif kind == ABORT:
                self._abort(request)
            elif request.status == LOADING:
                self.scheduler.requeue_loaded(request)

    def _handle_arrival(self) -> None:
        """Pass the next arrival to the API server, or end a request that the scheduler cannot serve."""
        time_ms = self.arrivals.next_ms
        request = self.arrivals.pop()
        request.arrival_ms = time_ms
        if request.is_as_recorded:
            request.e2e_ms = request.recorded_e2e_ms
            self._end(request, AS_RECORDED)
            return
        if not self.scheduler.accepts(request):
            request.e2e_ms = self.server.work_ms(request)
            self._end(request, UNSERVABLE)
            return
        request.has_arrived = True
        if self._shares_core:
            self.server.accept(request)
        else:
            self._push_event(self.server.entry_ms(request), ENTRY, request)
        if not isnan(request.abort_after_ms):
            self._push_event(time_ms + request.abort_after_ms, ABORT, request)

    def _queue_received(self) -> None:
        """Queue the requests that the API server on the shared core has received, for the scheduler."""
        for request in self.server.done:
            self._push_event(request.received_ms, ENTRY, request)
        self.server.done.clear()

    def _abort(self, request: SimulatedRequest) -> None:
        if request.outcome != NO_OUTCOME or not request.has_arrived:
            return
        if not isnan(request.entry_ms):
            self.scheduler.abort(request)
        self._end(request, ABORTED)

    def _end(self, request: SimulatedRequest, outcome: i64) -> None:
        left_ms = request.arrival_ms + (0.0 if isnan(request.abort_after_ms) else request.abort_after_ms)
        if outcome == OK and not isnan(request.abort_after_ms) and self._delivered_ms > left_ms:
            outcome = ABORTED  # the client aborted before the last token
        request.outcome = outcome
        self.has_updates = True
        if outcome == ABORTED:
            request.drop_undelivered(self.delivered_ms, left_ms)
        if request.num_delivered > 0:
            request.set_latencies(self.delivered_ms)
        if outcome == ABORTED:
            request.e2e_ms = request.abort_after_ms
        self.horizon_ms = min(self.horizon_ms, request.end_ms() + request.next_think_ms)
        push_next_turns(self.arrivals, request)

    def _start_fast_forward(self, step: Step) -> None:
        """Prepare to repeat ``step`` without the scheduler: a decode batch in which no request ends or needs a block.
        No waiting request can be admitted meanwhile: no block is freed or cached, and no request is queued. With async
        scheduling ``step`` is yet to run; else it has run."""
        steps = self._count_decode_steps(step)
        if steps <= 0:
            return
        self._repeated = step
        self._first_repeat = self.num_steps
        self._end_repeat = self.num_steps + steps
        self._kv_tokens = 0.0
        for request in self.scheduler.running:
            self._kv_tokens += float(request.num_computed - request.placeholders)

    def _fast_forward_decodes(self, step: Step) -> bool:
        """Fast-forward: repeat the decode step ``step`` until an event. True: continues after the horizon."""
        cost, decodes, repeated = self._cost, float(step.count), float(step.repeated_tokens)
        while self.num_steps < self._end_repeat:
            step_ms = cost.decode_step_ms(decodes, self._kv_tokens, repeated)
            if not self._is_undisturbed(step_ms):
                if self.horizon_ms <= self.now_ms < self.next_ms():
                    return True
                break
            if self._keeps_rows:
                cost.count_decode_step(decodes, self._kv_tokens, repeated)
            self._start_step(step_ms)
            self._finish_step()
            self._kv_tokens += decodes
        self.end_fast_forward()
        return False

    def end_fast_forward(self) -> None:
        """End the fast-forward: add the decoded tokens of the repeated steps to their requests."""
        step = self._repeated
        if step is None:
            return
        self._repeated = None
        repeated = self.num_steps - self._first_repeat
        for number in range(step.count):
            share = step.shares[number]
            decoding = cast(SimulatedRequest, share.request)
            decoding.add_tokens(self._first_repeat, repeated)
            decoding.num_tokens += repeated
            decoding.num_computed += repeated
            share.depth += repeated

    def _is_undisturbed(self, step_ms: float) -> bool:
        """Return whether no event is due before the next decode step, of ``step_ms``. On a shared core arrivals do not
        count, and the step must end before the horizon: API server work may double its duration."""
        if not self._shares_core:
            return self.now_ms < min(self.next_ms(), self.horizon_ms)
        if self.horizon_ms < inf:
            slowest_ms = self._noise.slowest * step_ms + self._carried_ms
            if (self.now_ms + 2.0 * slowest_ms) * ROUNDING >= self.horizon_ms:
                return False
        return self.now_ms < self._events.next_ms

    def _count_decode_steps(self, step: Step) -> i64:
        """Return the number of steps in which all running requests decode, and none ends or needs a block."""
        scheduler = self.scheduler
        ahead: i64 = 1 if self._composes_ahead else 0
        if step.preempted or step.admitted > 0 or step.total_tokens != step.count or step.count == 0:
            return 0
        if step.count != i64(len(scheduler.running)) or not scheduler.is_quiet:
            return 0
        most: i64 = UNLIMITED
        for number in range(step.count):
            request = step.shares[number].request
            computed = request.num_computed - ahead
            decodes = (
                request.placeholders == ahead
                and request.steps_in_flight == ahead
                and request.stale_steps == 0
                and computed == request.num_tokens - 1
                and computed >= request.prompt_tokens
            )
            if not decodes:
                return 0
            most = min(most, request.last_token - request.num_tokens - 1)
            most = min(most, min(request.allocated_tokens, request.next_full - 1) - request.num_computed)
            if most <= 0:
                return 0
        return most
