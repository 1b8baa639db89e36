"""An engine that keeps the model's time on a real clock: the simulator's scheduler and pool behind a server.

The loop is that of ``sim.engine.loop``. Its clock is virtual and absolute: a step begins where the last one ended, or
at an arrival if the engine was idle, and lasts as long as the model says. The real clock is only waited for, so a late
wake-up delays that step's tokens and nothing after them. At a step's end its tokens are told first, a slice at a time
with the loop's turn in between, so that they are on the wire and arrivals are stamped; the books come after.

As fast as it goes (``speed`` None) the order of everything is that of virtual time, and no time is waited for. The
clock shows the end of the last step; a request arrives at the time it shows when the request has been read, and while
there is nothing to compute it stands still, or goes to the next request that the API server is busy with.
"""

import asyncio
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

from measure.histogram import HistogramCounts, add_value, empty_counts
from sim.engine.apiserver import EntryClock
from sim.engine.simulation import make_scheduler, step_noise
from sim.latency.modelfile import Model
from sim.latency.noise import frontend_factors
from sim.latency.stepcost import StepCost
from sim.serving.output import Generation
from sim.vllm.scheduler import Step
from wire.alarm import Sleeper

LATENESS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 1.0)
"""Upper bounds of the buckets of a step's lateness, seconds."""


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
    lateness_s: HistogramCounts = field(default_factory=lambda: empty_counts(LATENESS_S))
    """Delay of each step's first token against the model's time; nothing is late at full speed."""

    def count_lateness(self, late_s: float) -> None:
        add_value(self.lateness_s, LATENESS_S, late_s)

    def count_step(self, told: Sequence[Generation], now_ms: float) -> None:
        self.steps += 1
        self.generation_tokens += len(told)
        for generation in told:
            if generation.token_ms:
                generation.token_ms[1] = now_ms
            else:
                generation.token_ms = [now_ms, now_ms]
                self.prompt_tokens += generation.request.prompt_tokens
                self.cached_prompt_tokens += generation.request.cached_tokens


TOLD_AT_ONCE = 32
"""Tokens told in one turn of the event loop: what writing them takes, a request may have to wait to be read."""


class RealTimeEngine:
    """``speed``: virtual seconds per real second; None: no sleeping. ``noise_seed`` None: medians. One event loop."""

    def __init__(self, model: Model, *, speed: float | None = 1.0, noise_seed: int | None = None) -> None:
        self.scheduler = make_scheduler(model.engine)
        self.counters = EngineCounters()
        self.now_ms = 0.0
        self._model = model
        self.config = model.engine
        self._cost = StepCost(list(model.costs))
        self._noise = step_noise(model.noise, noise_seed)
        self._noise_seed = noise_seed
        self._composes_ahead = model.engine.async_scheduling
        self._steps = (Step(), Step())
        self._composed: Step | None = None
        self._generations: dict[int, Generation] = {}
        self._arrivals: list[tuple[float, int]] = []
        self._aborts: list[Generation] = []
        self._frontend = EntryClock(is_serial=model.frontend_placement != "parallel")
        self._next_index = 0
        self._ns_per_ms = None if speed is None else 1e6 / speed
        self._epoch_ns = perf_counter_ns()
        self._sleeper: Sleeper | None = None
        self._idle = False
        self._unsettled: Step | None = None
        self._step_end_ms = float("-inf")
        self._told: list[Generation] = []
        self.on_first: Callable[[Generation], None] | None = None
        """Called with each output whose first token is on the books."""
        self.on_end: Callable[[Generation], None] | None = None
        """Called with each output that has ended, aborts included."""

    async def run(self) -> None:
        self._sleeper = Sleeper()
        try:
            while True:
                self._take_in()
                step = self._composed or self._compose(self._steps[0], is_idle=True)
                if step is None:
                    await self._wait_for_arrival()
                    continue
                other = self._steps[step is self._steps[0]]
                self._composed = self._compose(other, is_idle=False) if self._composes_ahead else None
                end_ms = self.now_ms + self._duration_ms(step)
                await self._sleep_until(end_ms)
                self.now_ms = self._step_end_ms = end_ms
                await self._tell(step)
                self.settle()
        finally:
            self._sleeper.close()
            self.abort_all()

    def submit(self, generation: Generation, arrival_ms: float | None = None) -> None:
        """Let a request arrive at ``arrival_ms`` or now; it enters the server's time later."""
        request = generation.request
        request.index = self._next_index
        self._next_index += 1
        arrival_ms = self.clock_ms() if arrival_ms is None else arrival_ms
        generation.arrival_ms = arrival_ms
        self._generations[request.index] = generation
        work_ms = self._cost.reception_ms(request.prompt_tokens)
        work_ms *= float(frontend_factors(self._model.noise, self._noise_seed, [request.request_id])[0])
        entry_ms = self._frontend.entry_ms(arrival_ms, work_ms)
        heapq.heappush(self._arrivals, (entry_ms, request.index))
        self._wake()

    def abort(self, generation: Generation) -> None:
        """Forget a request, its client being gone: at once if it has not entered, else between two steps."""
        if generation.outcome is None:
            self._aborts.append(generation)
            self._wake()

    def abort_all(self) -> None:
        self.settle()
        for generation in list(self._generations.values()):
            self._abort(generation)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while a request holds blocks."""
        self.settle()
        return self.scheduler.cache.reset()

    def clock_ms(self) -> float:
        """Now on the engine's clock; at ``speed`` None that is the end of the last step."""
        return self.time_ms(perf_counter_ns())

    def time_ms(self, at_ns: int) -> float:
        """Return the engine's time at a moment of ``perf_counter_ns``; at ``speed`` None, its time now."""
        return self.now_ms if self._ns_per_ms is None else (at_ns - self._epoch_ns) / self._ns_per_ms

    def moment_ns(self, virtual_ms: float) -> int:
        """Return the moment of ``perf_counter_ns`` at which the engine's clock shows ``virtual_ms``; needs a speed."""
        assert self._ns_per_ms is not None
        return self._epoch_ns + round(virtual_ms * self._ns_per_ms)

    def delivery_ms(self, prompt_tokens: int) -> float:
        """Return the API server's time to send a first token, in real time; 0 at full speed."""
        real_ms = self._cost.delivery_ms(prompt_tokens)
        return 0.0 if self._ns_per_ms is None else real_ms * self._ns_per_ms / 1e6

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that arrived and do not run."""
        return len(self._generations) - len(self.scheduler.running)

    @property
    def kv_usage(self) -> float:
        return self.scheduler.cache.usage()

    def _take_in(self) -> None:
        """Take in aborted requests, then requests that the API server has passed on by now."""
        for generation in self._aborts:
            self._abort(generation)
        self._aborts.clear()
        while self._arrivals and self._arrivals[0][0] <= self.now_ms:
            _, index = heapq.heappop(self._arrivals)
            arrived = self._generations.get(index)
            if arrived is not None:  # or else its client left meanwhile
                arrived.entered = True
                arrived.request.arrival_ms = arrived.arrival_ms
                self.scheduler.add(arrived.request)

    def _compose(self, step: Step, *, is_idle: bool) -> Step | None:
        if not self.scheduler.has_work():
            return None
        schedule = self.scheduler.schedule_when_idle if is_idle else self.scheduler.schedule
        self.counters.preemptions += schedule(step)
        return step if step.count else None

    def _duration_ms(self, step: Step) -> float:
        self._cost.count_step(step, self._step_end_ms)
        duration_ms = self._cost.step_ms()
        return duration_ms * self._noise.factor(self.now_ms, duration_ms)

    async def _sleep_until(self, virtual_ms: float) -> None:
        assert self._sleeper is not None
        if self._ns_per_ms is not None:
            await self._sleeper.sleep_until(self.moment_ns(virtual_ms))

    async def _wait_for_arrival(self) -> None:
        """Idle: move the clock to the next entry, or sleep until something comes."""
        assert self._sleeper is not None
        self._idle = True
        if not self._arrivals:
            if not self._aborts:
                await self._sleeper.sleep_until(None)
        else:
            entry_ms = self._arrivals[0][0]
            await self._sleep_until(entry_ms)
            # Woken early, it was by a new arrival or an abort: the next entry may be another one.
            if self._ns_per_ms is None or self.clock_ms() >= entry_ms:
                self.now_ms = max(self.now_ms, entry_ms)
        self._idle = False

    def _wake(self) -> None:
        if self._idle and self._sleeper is not None:
            self._sleeper.wake()

    async def _tell(self, step: Step) -> None:
        """Tell the requests for which the step sampled a token that it is over."""
        if self._ns_per_ms is not None:
            self.counters.count_lateness(max(0, perf_counter_ns() - self.moment_ns(self.now_ms)) / 1e9)
        generations = self._generations
        sampled = [
            generations[share.request.index]
            for share in step.shares[: step.count]
            if share.samples and not share.request.is_finished()
        ]
        # Those whose first token it is go first: the step's order would have them wait for all that decode.
        beginning = [generation for generation in sampled if not generation.delivered]
        if beginning:
            sampled = beginning + [generation for generation in sampled if generation.delivered]
        for first in range(0, len(sampled) or 1, TOLD_AT_ONCE):
            self._give_tokens(sampled[first : first + TOLD_AT_ONCE])
            if first + TOLD_AT_ONCE >= len(sampled):
                self._unsettled = step
            await asyncio.sleep(0)

    def _give_tokens(self, generations: list[Generation]) -> None:
        told = self._told
        for generation in generations:
            if generation.outcome is None:
                generation.delivered += 1
                if generation.delivered == len(generation.output.token_ids):
                    generation.outcome = "finished"
                told.append(generation)
                generation.on_progress(generation)

    def settle(self) -> None:
        """Do the books of a step that has been told; readers of them in the meantime call this first."""
        step, self._unsettled = self._unsettled, None
        if step is None:
            return
        told, self._told = self._told, []
        self.scheduler.finish_step(step)
        if self.on_first is not None:
            for generation in told:
                if not generation.token_ms:
                    self.on_first(generation)
        self.counters.count_step(told, self.now_ms)
        for generation in told:
            if generation.outcome == "finished":
                del self._generations[generation.request.index]
                self.counters.finished[generation.output.finish_reason] += 1
                if self.on_end is not None:
                    self.on_end(generation)

    def _abort(self, generation: Generation) -> None:
        if generation.outcome is not None:
            return
        generation.outcome = "aborted"
        del self._generations[generation.request.index]
        self.counters.finished["abort"] += 1
        if generation.entered:
            self.scheduler.abort(generation.request)
        if self.on_end is not None:
            self.on_end(generation)
        generation.on_progress(generation)
