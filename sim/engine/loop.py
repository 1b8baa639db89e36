"""Step loop of one engine: deliver events, compose a step, run it, repeat it while it would be the same again.

mypyc compiles this module.
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
BEGUN: Final = 0
IDLED: Final = 1
DONE: Final = 2
"""Nothing is left to arrive or to compute."""
PAUSED: Final = 3
"""The clock is at the horizon."""
ROUNDING: Final = 1.0 + 1e-9


class Engine:
    """Engine with its API server, in virtual time.

    ``composes_ahead``: the next step is composed while one runs. ``keeps_rows``: times and counts of steps are kept.
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
        """Requests that come."""
        self.now_ms: float = now_ms
        self.horizon_ms: float = inf
        """Requests that are not known yet come then or later."""
        self.num_steps: i64 = 0
        """Steps in the timeline, the API server's own on a shared core included."""
        self.engine_steps: i64 = 0
        self.preemptions: i64 = 0
        self.has_news: bool = False
        """A request got its first token or ended."""
        self.starts_ms: vec[float] = vec[float]()
        self.ends_ms: vec[float] = vec[float]()
        self.seen_ms: vec[float] = vec[float]()
        """When clients see a step's tokens."""
        self.rows: vec[float] = vec[float]()
        self._cost: StepCost = cost
        self._noise: StepNoise = noise
        self._ahead: bool = composes_ahead
        self._keeps_rows: bool = keeps_rows
        self._shares_core: bool = server.placement == SHARED_CORE
        self._events: EventHeap = EventHeap()
        self._steps: tuple[Step, Step] = (Step(), Step())
        self._composed: Step | None = None
        """Step that was composed and does not run yet."""
        self._running: Step | None = None
        """Step that began at ``_start_ms`` and has ``_left_ms`` to go."""
        self._repeated: Step | None = None
        """Step of decodes that is repeated from step ``_first_repeat`` of the timeline on, up to ``_end_repeat``."""
        self._first_repeat: i64 = 0
        self._end_repeat: i64 = 0
        self._kv_tokens: float = 0.0
        """KV tokens that the next of these reads."""
        self._start_ms: float = 0.0
        self._left_ms: float = 0.0
        self._seen_ms: float = -inf
        """Time at which clients see the last step's tokens."""
        self._carried_ms: float = 0.0
        """Rest of a delivery, done beside the next step."""
        self._step_end_ms: float = -inf

    def next_ms(self) -> float:
        """Time of the next event; infinity: there is none."""
        return min(self.arrivals.next_ms, self._events.next_ms)

    def run(self, horizon_ms: float = inf) -> bool:
        """Run up to the horizon; True if nothing is left to arrive or to compute.

        Raises InputError if hashes are not chained.
        """
        self.horizon_ms = horizon_ms
        while True:
            if self._repeated is not None and self._repeat_decodes(self._repeated):
                return False
            if self._running is None:
                status = self._begin_next()
                if status == IDLED:
                    continue
                if not self.scheduler.cache.is_chained():
                    raise InputError("block_hashes: a hash occurs at two depths; expected chained hashes")
                if status != BEGUN:
                    return status == DONE
            step = self._running
            if step is None or not self._go_on():
                return False
            self._running = None
            self._hand_out(step)
            again = self._composed if self._ahead else step
            if again is not None:
                self._begin_repeat(again)

    def resumes_ms(self) -> float:
        """Return the time before which nothing happens in the engine, which has paused."""
        if self._running is not None:
            return self.server.resumes_ms
        if self._composed is not None or self.now_ms >= self.horizon_ms:
            return min(self.now_ms, self.next_ms())  # a client may have gone during the step
        if self.server.is_busy():
            return min(self.next_ms(), self.now_ms + self.server.left_ms())
        return self.next_ms()

    def is_paused(self) -> bool:
        """Return whether the engine stands still within a step."""
        return self._running is not None

    def _note(self, time_ms: float, kind: i64, request: SimulatedRequest) -> None:
        self._events.push(time_ms, (kind << 40) + request.index, request)

    def _begin_next(self) -> i64:
        """Begin the next step, or move the clock to where there may be one; or return the reason to stop."""
        self._deliver_events()
        if self.now_ms >= self.horizon_ms:
            return PAUSED
        first, second = self._steps
        step = self._composed
        if step is None:
            step = first
            if not self._compose(step, at_rest=True):
                if self._idle():
                    return IDLED
                return DONE if self.horizon_ms == inf else PAUSED
        self._composed = None
        other = first if step is second else second
        if self._ahead and self._compose(other, at_rest=False):
            self._composed = other
        self._cost.count_step(step, self._step_end_ms)
        self._begin(self._cost.step_ms())
        self._running = step
        return BEGUN

    def _compose(self, step: Step, *, at_rest: bool) -> bool:
        """Compose the next step; False if there is nothing to compute. ``at_rest``: no other step runs."""
        scheduler = self.scheduler
        offloading = scheduler.offloading
        if not scheduler.has_work():
            if offloading is not None:
                offloading.use_ended()  # vLLM takes a step of no requests after the last one's end
            return False
        if offloading is not None:
            offloading.begin_step(self.now_ms)
        self.preemptions += scheduler.schedule_at_rest(step) if at_rest else scheduler.schedule(step)
        if offloading is not None:
            for loading in offloading.new_loads:
                self._note(loading.load_end_ms, LOADED, cast(SimulatedRequest, loading))
            offloading.new_loads.clear()
        for number in range(step.count - step.admitted, step.count):
            request = cast(SimulatedRequest, step.shares[number].request)
            if isnan(request.admitted_ms):
                request.admitted_ms = self.now_ms
        return step.count > 0

    def _begin(self, step_ms: float) -> None:
        """Begin a step that is predicted to take ``step_ms``."""
        self._start_ms = self.now_ms
        self._left_ms = step_ms * self._noise.factor(self.now_ms, step_ms) + self._carried_ms
        self._carried_ms = 0.0

    def _go_on(self) -> bool:
        """Move the clock to the step's end, and the API server with it on a shared core; False if the step pauses."""
        if self._shares_core:
            if not self._share_core():
                return False
        else:
            self.now_ms = self._start_ms + self._left_ms
        self._step_end_ms = self.now_ms
        self.engine_steps += 1
        self._append(self._start_ms)
        return True

    def _share_core(self) -> bool:
        """Run the step beside the API server's work; False: the step pauses."""
        while self._left_ms > 0.0:
            while self.arrivals.next_ms <= self.now_ms:
                self._next_arrival()
            until_ms = self.arrivals.next_ms
            self.now_ms, self._left_ms = self.server.run_beside(self.now_ms, self._left_ms, until_ms, self.horizon_ms)
            if self._left_ms > 0.0 and self.now_ms < until_ms:
                return False
        self._hand_over()
        return True

    def _append(self, start_ms: float) -> None:
        """Add a step to the timeline; its counts, where they are kept, are in the cost's row."""
        self._seen_ms = max(self._seen_ms, self.now_ms)
        self.seen_ms = append(self.seen_ms, self._seen_ms)
        if self._keeps_rows:
            self.starts_ms = append(self.starts_ms, start_ms)
            self.ends_ms = append(self.ends_ms, self.now_ms)
            self.rows = extend(self.rows, self._cost.row)
        self.num_steps += 1

    def _hand_out(self, step: Step) -> None:
        """Hand out the tokens of the step that has ended."""
        last = self.num_steps - 1
        first_tokens: i64 = 0
        for number in range(step.count):
            share = step.shares[number]
            if share.samples:
                request = cast(SimulatedRequest, share.request)
                if not request.is_finished():
                    if request.num_seen == 0:
                        first_tokens += request.prompt_tokens
                        self.has_news = True
                    request.see_tokens(last, 1)
        finished = self.scheduler.finish_step(step)
        if first_tokens > 0:
            self._deliver(first_tokens)
        for ended in finished:
            self._end(cast(SimulatedRequest, ended), OK)

    def _deliver(self, prompt_tokens: i64) -> None:
        """Delay the tokens of the last step, which holds first tokens of prompts of ``prompt_tokens`` together. On a
        shared core the engine, if it has work, takes half of the core meanwhile."""
        work_ms = self._cost.delivery_ms(prompt_tokens)
        goes_on = self._composed is not None or self.scheduler.has_work()
        self._carried_ms = work_ms if goes_on and self._shares_core else 0.0
        self._seen_ms = max(self._seen_ms, self.now_ms + work_ms + self._carried_ms)
        self.seen_ms[self.num_steps - 1] = self._seen_ms

    def _idle(self) -> bool:
        """Move the clock, while the engine is idle, to the next event; False if there is none before the horizon."""
        coming_ms = self.next_ms()
        if self.server.is_busy():
            start_ms = self.now_ms
            if min(start_ms + self.server.left_ms(), coming_ms) >= self.horizon_ms:
                return False
            self._cost.clear()
            self.now_ms = self.server.run_alone(start_ms, coming_ms)
            self._append(start_ms)
            self._hand_over()
            return True
        if coming_ms >= self.horizon_ms:
            return False
        self.now_ms = max(self.now_ms, coming_ms)
        return True

    def _deliver_events(self) -> None:
        """Deliver all events up to now, in order; of one time, arrivals first."""
        events = self._events
        while self.next_ms() <= self.now_ms and self.next_ms() < self.horizon_ms:
            if self.arrivals.next_ms <= events.next_ms:
                self._next_arrival()
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
                self.scheduler.take_up(request)

    def _next_arrival(self) -> None:
        """Let the API server work on the next request that arrives, or refuse it."""
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
            self._note(self.server.entry_ms(request), ENTRY, request)
        if not isnan(request.abort_after_ms):
            self._note(time_ms + request.abort_after_ms, ABORT, request)

    def _hand_over(self) -> None:
        """Hand requests that the API server on the shared core has received to the scheduler."""
        for request in self.server.done:
            self._note(request.received_ms, ENTRY, request)
        self.server.done.clear()

    def _abort(self, request: SimulatedRequest) -> None:
        if request.outcome != NO_OUTCOME or not request.has_arrived:
            return
        if not isnan(request.entry_ms):
            self.scheduler.abort(request)
        self._end(request, ABORTED)

    def _end(self, request: SimulatedRequest, outcome: i64) -> None:
        left_ms = request.arrival_ms + (0.0 if isnan(request.abort_after_ms) else request.abort_after_ms)
        if outcome == OK and not isnan(request.abort_after_ms) and self._seen_ms > left_ms:
            outcome = ABORTED  # its last token came after the client had gone
        request.outcome = outcome
        self.has_news = True
        if outcome == ABORTED:
            request.forget_unseen(self.seen_ms, left_ms)
        if request.num_seen > 0:
            request.note_seen(self.seen_ms)
        if outcome == ABORTED:
            request.e2e_ms = request.abort_after_ms
        self.horizon_ms = min(self.horizon_ms, request.end_ms() + request.next_think_ms)
        push_next_turns(self.arrivals, request)

    def _begin_repeat(self, step: Step) -> None:
        """Let steps repeat ``step`` without the scheduler: decodes only, none of which ends or needs a block. A request
        that was not admitted in it cannot be admitted now: nothing has been freed or queued since, or cached that it
        could hit. Composing ahead, ``step`` is yet to run; else it ran."""
        most = self._most_decodes(step)
        if most <= 0:
            return
        self._repeated = step
        self._first_repeat = self.num_steps
        self._end_repeat = self.num_steps + most
        self._kv_tokens = 0.0
        for request in self.scheduler.running:
            self._kv_tokens += float(request.num_computed - request.placeholders)

    def _repeat_decodes(self, step: Step) -> bool:
        """Run the steps that repeat ``step``, until there is an event; True if they go on after the horizon."""
        cost, decodes, repeated = self._cost, float(step.count), float(step.repeated_tokens)
        while self.num_steps < self._end_repeat:
            step_ms = cost.decode_step_ms(decodes, self._kv_tokens, repeated)
            if not self._is_undisturbed(step_ms):
                if self.horizon_ms <= self.now_ms < self.next_ms():
                    return True
                break
            if self._keeps_rows:
                cost.count_decode_step(decodes, self._kv_tokens, repeated)
            self._begin(step_ms)
            self._go_on()
            self._kv_tokens += decodes
        self.end_repeat()
        return False

    def end_repeat(self) -> None:
        """Count the tokens of the steps that were repeated."""
        step = self._repeated
        if step is None:
            return
        self._repeated = None
        repeated = self.num_steps - self._first_repeat
        for number in range(step.count):
            share = step.shares[number]
            decoding = cast(SimulatedRequest, share.request)
            decoding.see_tokens(self._first_repeat, repeated)
            decoding.num_tokens += repeated
            decoding.num_computed += repeated
            share.depth += repeated

    def _is_undisturbed(self, step_ms: float) -> bool:
        """Return whether no event has to be delivered before the next step, of ``step_ms``. On a shared core an arrival
        does not count, and the step must end before the horizon: the API server may double its time."""
        if not self._shares_core:
            return self.now_ms < min(self.next_ms(), self.horizon_ms)
        if self.horizon_ms < inf:
            slowest_ms = self._noise.slowest * step_ms + self._carried_ms
            if (self.now_ms + 2.0 * slowest_ms) * ROUNDING >= self.horizon_ms:
                return False
        return self.now_ms < self._events.next_ms

    def _most_decodes(self, step: Step) -> i64:
        """Number of steps in which all running requests only decode, and none ends or needs a block."""
        scheduler = self.scheduler
        ahead: i64 = 1 if self._ahead else 0
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
            most = min(most, min(request.room_tokens, request.next_full - 1) - request.num_computed)
            if most <= 0:
                return 0
        return most
