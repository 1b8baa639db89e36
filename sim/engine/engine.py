"""An engine in virtual time: arrivals, the scheduler's steps, and the clock that the model of their durations moves.

Everything is decided by the arrivals, the settings, the model and the seed; there is no real clock and no thread.
"""

import heapq
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field

import numpy as np

from sim.engine.timeline import Timeline
from sim.latency.clocks import FrontendClock, FrontendModel, StepModel
from sim.latency.modelfile import Model
from sim.latency.noise import Floats, StepLuck
from sim.latency.sharedcore import SharedCore
from sim.latency.terms import StepRow, decode_row, step_row
from sim.vllm.config import EngineConfig
from sim.vllm.pool import BlockPool
from sim.vllm.request import Request
from sim.vllm.scheduler import PrefixStats, Scheduler, Step
from sim.workload.workload import Arrival

_ENTER, _ABORT = 0, 1


@dataclass(slots=True)
class Flight:
    """What became of one arrival. Times on the trace's clock, ms."""

    arrival: Arrival
    arrival_ms: float
    request: Request | None = None
    """None until it arrives; stays None where the engine never gets it."""
    entry_ms: float | None = None
    """When the scheduler got it."""
    admitted_ms: float | None = None
    """When the step was composed that first served it."""
    token_steps: MutableSequence[int] = field(default_factory=list)
    """The step at whose end each token appeared, as a place in the timeline."""
    outcome: str | None = None
    """ok, aborted, unservable, parent_failed, as_recorded. None: not ended yet."""
    ttft_ms: float | None = None
    """From arrival to the first token."""
    itl_ms: Floats = field(default_factory=lambda: np.empty(0))
    e2e_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Simulation:
    """A finished run: a flight per arrival, in their order, and the engine's steps."""

    flights: list[Flight]
    timeline: Timeline
    prefix: PrefixStats
    preemptions: int
    block_size: int
    """Tokens in a block of the engine's."""


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
        self.scheduler = Scheduler(config)
        if pool is not None:
            self.scheduler.pool = pool
        self.timeline = Timeline()
        self.now_ms = 0.0
        self._step_model: StepModel = model.step
        self._frontend: FrontendModel = model.frontend
        self._luck = StepLuck(model.noise, seed)
        self._frontend_factors: list[float] = model.noise.frontend_factors(
            seed, [arrival.record.request_id for arrival in arrivals]
        ).tolist()
        self._skips = fast_forward and not config.async_scheduling
        self._composes_ahead = config.async_scheduling
        self._flights = [Flight(arrival, arrival.arrival_ms) for arrival in arrivals]
        self._children: dict[int, list[int]] = {}
        self._arrivals: list[tuple[float, int]] = []
        self._events: list[tuple[float, int, int]] = []
        self._core = SharedCore() if self._frontend.placement == "shared_core" else None
        self._composed: Step | None = None
        self._frontend_clock = FrontendClock(self._frontend)
        self._carried_ms = 0.0
        """What the front end on the shared core still has to do of a first token's delivery, beside the next step."""
        self._preemptions = 0
        for place, arrival in enumerate(arrivals):
            if arrival.parent is None:
                heapq.heappush(self._arrivals, (arrival.arrival_ms, place))
            else:
                self._children.setdefault(arrival.parent, []).append(place)

    def run(self) -> Simulation:
        """Until nothing is left to arrive or to compute."""
        while True:
            self._deliver_events()
            step = self._composed or self._compose(at_rest=True)
            if step is None:
                if not self._idle():
                    break
                continue
            self._composed = self._compose(at_rest=False) if self._composes_ahead else None
            self._run_step(step)
            if self._skips:
                self._skip_decodes(step)
        return Simulation(
            self._flights, self.timeline, self.scheduler.stats, self._preemptions, self.scheduler.config.block_size
        )

    def _compose(self, *, at_rest: bool) -> Step | None:
        """The next step, or None if there is nothing to compute. ``at_rest``: no other runs."""
        if not self.scheduler.has_work:
            return None
        step = self.scheduler.schedule_at_rest() if at_rest else self.scheduler.schedule()
        self._preemptions += len(step.preempted)
        for request in step.admitted:
            flight = self._flights[request.index]
            flight.admitted_ms = self.now_ms if flight.admitted_ms is None else flight.admitted_ms
        return step if step.scheduled else None

    def _run_step(self, step: Step) -> None:
        """Move the clock over ``step``; its tokens appear at its end."""
        sampled = [share.request for share in step.scheduled if share.samples and share.request.state != "finished"]
        self._advance(step_row(step))
        last = len(self.timeline) - 1
        finished = self.scheduler.finish_step(step)
        firsts = [request.prompt_tokens for request in sampled if not self._flights[request.index].token_steps]
        if firsts:
            self._deliver(sum(firsts))
        for request in sampled:
            self._flights[request.index].token_steps.append(last)
        for request in finished:
            self._end(request.index, "ok")

    def _deliver(self, prompt_tokens: int) -> None:
        """The last step has first tokens of prompts of so many together: all of its tokens are seen as much later. On
        a shared core the engine, if it goes on, takes half of it meanwhile."""
        work_ms = self._frontend.delivery_ms(prompt_tokens)
        shared = self._core is not None and (self._composed is not None or self.scheduler.has_work)
        self._carried_ms = work_ms if shared else 0.0
        self.timeline.delay(self.now_ms + work_ms + self._carried_ms)

    def _idle(self) -> bool:
        """Let the clock go on without the engine, to whatever happens next; False if nothing does."""
        if self._core is not None and self._core.is_busy:
            start_ms = self.now_ms
            self.now_ms, row = self._core.run_alone(start_ms, self._next_ms())
            self.timeline.append(start_ms, self.now_ms, row)
            self._hand_over()
            return True
        next_ms = self._next_ms()
        self.now_ms = max(self.now_ms, next_ms)
        return next_ms < float("inf")

    def _advance(self, row: StepRow) -> None:
        """Move the clock over a step of ``row``, and the front end with it on a shared core."""
        start_ms, step_ms = self.now_ms, self._step_model.row_ms(row)
        step_ms = step_ms * self._luck.factor(start_ms, step_ms) + self._carried_ms
        self._carried_ms = 0.0
        if self._core is not None:
            row = (*row, *self._share_core(step_ms))
        else:
            self.now_ms = start_ms + step_ms
        self.timeline.append(start_ms, self.now_ms, row)

    def _share_core(self, left_ms: float) -> StepRow:
        """Run ``left_ms`` of the engine's work beside the front end's; what the latter did."""
        assert self._core is not None
        requests = tokens = 0.0
        while left_ms > 0.0:
            self._receive()
            until_ms = self._arrivals[0][0] if self._arrivals else float("inf")
            self.now_ms, left_ms, (more_requests, more_tokens) = self._core.run_beside(self.now_ms, left_ms, until_ms)
            requests, tokens = requests + more_requests, tokens + more_tokens
        self._hand_over()
        return (requests, tokens)

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
            self._advance(decode_row(len(running), kv_tokens))
            kv_tokens += len(running)
            count += 1
        for request in running:
            request.num_tokens += count
            request.num_computed += count
            self._flights[request.index].token_steps.extend(range(first, first + count))

    def _at(self, time_ms: float, kind: int, place: int) -> None:
        heapq.heappush(self._events, (time_ms, kind, place))

    def _next_ms(self) -> float:
        """When the next thing happens outside; infinity: nothing will."""
        arrival_ms = self._arrivals[0][0] if self._arrivals else float("inf")
        return min(arrival_ms, self._events[0][0]) if self._events else arrival_ms

    def _wake_ms(self) -> float:
        """When something next happens that the scheduler must see; on a shared core, an arrival alone is not it."""
        if self._core is None:
            return self._next_ms()
        return self._events[0][0] if self._events else float("inf")

    def _deliver_events(self) -> None:
        """Everything that has happened outside by now, in its order."""
        while self._next_ms() <= self.now_ms:
            if not self._events or (self._arrivals and self._arrivals[0][0] <= self._events[0][0]):
                self._arrive(*heapq.heappop(self._arrivals))
                continue
            time_ms, kind, place = heapq.heappop(self._events)
            if kind == _ENTER:
                self._enter(place, time_ms)
            else:
                self._abort(place)

    def _receive(self) -> None:
        """Arrivals by now, while a step runs."""
        while self._arrivals and self._arrivals[0][0] <= self.now_ms:
            self._arrive(*heapq.heappop(self._arrivals))

    def _hand_over(self) -> None:
        """What the front end on the shared core has finished enters the scheduler at its next step."""
        assert self._core is not None
        for time_ms, place in self._core.take_done():
            self._at(time_ms, _ENTER, place)

    def _arrive(self, time_ms: float, place: int) -> None:
        flight = self._flights[place]
        arrival = flight.arrival
        flight.arrival_ms = time_ms
        if arrival.fate == "as_recorded":
            flight.e2e_ms = arrival.record.e2e_ms
            self._end(place, "as_recorded")
            return
        request = Request(
            arrival.record.request_id, arrival.prompt_tokens, arrival.output_tokens, arrival.hashes, time_ms, place
        )
        request.priority = arrival.record.priority or 0
        if not self.scheduler.accepts(request):
            flight.e2e_ms = self._work_ms(place)
            self._end(place, "unservable")
            return
        flight.request = request
        if self._core is None:
            self._at(self._frontend_clock.entry_ms(time_ms, self._work_ms(place)), _ENTER, place)
        else:
            self._core.accept(place, arrival.prompt_tokens, self._work_ms(place))
        if arrival.patience_ms is not None:
            self._at(time_ms + arrival.patience_ms, _ABORT, place)

    def _work_ms(self, place: int) -> float:
        """What the front end takes for a request, with its luck."""
        return self._frontend.work_ms(self._flights[place].arrival.prompt_tokens) * self._frontend_factors[place]

    def _enter(self, place: int, time_ms: float) -> None:
        flight = self._flights[place]
        if flight.outcome is None and flight.request is not None:
            flight.entry_ms = time_ms
            self.scheduler.add(flight.request)

    def _abort(self, place: int) -> None:
        flight = self._flights[place]
        if flight.outcome is not None or flight.request is None:
            return
        if flight.entry_ms is not None:
            self.scheduler.abort(flight.request)
        self._end(place, "aborted")

    def _end(self, place: int, outcome: str) -> None:
        """Fix what the client saw, and let the children follow."""
        flight = self._flights[place]
        left_ms = flight.arrival_ms + (flight.arrival.patience_ms or 0.0)
        seen_ms = self.timeline.seen_ms
        if outcome == "ok" and flight.arrival.patience_ms is not None and seen_ms[flight.token_steps[-1]] > left_ms:
            outcome = "aborted"  # its last token came after the client had gone
        flight.outcome = outcome
        if outcome == "aborted":
            flight.token_steps = [step for step in flight.token_steps if seen_ms[step] <= left_ms]
        if flight.token_steps:
            self._see_tokens(flight)
        if outcome == "aborted":
            flight.e2e_ms = flight.arrival.patience_ms
        end_ms = flight.arrival_ms + (flight.e2e_ms or 0.0)
        failed = outcome in {"unservable", "parent_failed"}
        for child in self._children.get(place, ()):
            arrival_ms = end_ms + self._flights[child].arrival.think_ms
            if failed:
                self._flights[child].arrival_ms = arrival_ms
                self._end(child, "parent_failed")
            else:
                heapq.heappush(self._arrivals, (arrival_ms, child))

    def _see_tokens(self, flight: Flight) -> None:
        """TTFT, gaps and end as the client sees them."""
        seen_ms = np.array([self.timeline.seen_ms[step] for step in flight.token_steps])
        flight.ttft_ms = float(seen_ms[0] - flight.arrival_ms)
        flight.itl_ms = np.diff(seen_ms)
        flight.e2e_ms = float(seen_ms[-1] - flight.arrival_ms)


def _plain_decodes(request: Request, block_size: int) -> int:
    """Steps in which ``request`` only decodes: its last block neither fills nor overflows, and it does not end."""
    lacking = request.num_tokens - request.num_computed
    into_block = request.num_computed % block_size
    if lacking != 1 or into_block == 0 or request.num_computed < request.prompt_tokens:
        return 0
    return min(block_size - 1 - into_block, request.last_token - request.num_tokens - 1)
