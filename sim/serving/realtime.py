"""Simulated engine on a real clock: the simulator's scheduler and block pool behind a server.

The loop is that of ``sim.engine.loop``. Its clock is virtual and absolute: a step begins at the end of the last step,
or at an arrival if the engine was idle, and takes the latency model's time. The engine only sleeps until the real
clock arrives there, so a late wake-up delays the step's tokens and nothing after. At the end of a step its tokens are
delivered first, some per turn of the event loop, so that they are sent and arrivals are stamped; the scheduler's state
is updated after.

At full speed (``speed`` None) all events are in virtual-time order without sleeping. The clock shows the end of the
last step; a request arrives at the clock's time when it has been read. While idle, the clock stops, or moves to the
next request in the API server.
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
    """Token, step and request totals since the start."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
    lateness_s: HistogramCounts = field(default_factory=lambda: empty_counts(LATENESS_S))
    """Delay of each step's first token against the latency model; 0 at full speed."""

    def count_lateness(self, late_s: float) -> None:
        add_value(self.lateness_s, LATENESS_S, late_s)

    def count_step(self, generations: Sequence[Generation], now_ms: float) -> None:
        self.steps += 1
        self.generation_tokens += len(generations)
        for generation in generations:
            if generation.token_ms:
                generation.token_ms[1] = now_ms
            else:
                generation.token_ms = [now_ms, now_ms]
                self.prompt_tokens += generation.request.prompt_tokens
                self.cached_prompt_tokens += generation.request.cached_tokens


DELIVERED_PER_TURN = 32
"""Tokens delivered per turn of the event loop: a request waits as long to be read."""


class RealTimeEngine:
    """``speed``: virtual seconds per real second; None: no sleeping. ``noise_seed`` None: median latency."""

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
        self._unflushed: Step | None = None
        self._step_end_ms = float("-inf")
        self._delivered: list[Generation] = []
        self.on_first: Callable[[Generation], None] | None = None
        """Called with each output after its first token."""
        self.on_end: Callable[[Generation], None] | None = None
        """Called with each finished or aborted output."""

    async def run(self) -> None:
        self._sleeper = Sleeper()
        try:
            while True:
                self._accept_requests()
                step = self._composed or self._compose(self._steps[0], is_idle=True)
                if step is None:
                    await self._wait_for_arrival()
                    continue
                other = self._steps[step is self._steps[0]]
                self._composed = self._compose(other, is_idle=False) if self._composes_ahead else None
                end_ms = self.now_ms + self._duration_ms(step)
                await self._sleep_until(end_ms)
                self.now_ms = self._step_end_ms = end_ms
                await self._deliver(step)
                self.flush()
        finally:
            self._sleeper.close()
            self.abort_all()

    def submit(self, generation: Generation, arrival_ms: float | None = None) -> None:
        """Add a request that arrives at ``arrival_ms`` or now; the scheduler gets it after the API server."""
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
        """Abort the request of a disconnected client: at once if not yet scheduled, else between two steps."""
        if generation.outcome is None:
            self._aborts.append(generation)
            self._wake()

    def abort_all(self) -> None:
        self.flush()
        for generation in list(self._generations.values()):
            self._abort(generation)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False, without effect, while a request holds blocks."""
        self.flush()
        return self.scheduler.cache.reset()

    def clock_ms(self) -> float:
        """Return the engine's time; at ``speed`` None, the end of the last scheduler step."""
        return self.time_ms(perf_counter_ns())

    def time_ms(self, at_ns: int) -> float:
        """Return the engine's time at a moment of ``perf_counter_ns``; at ``speed`` None, its time now."""
        return self.now_ms if self._ns_per_ms is None else (at_ns - self._epoch_ns) / self._ns_per_ms

    def moment_ns(self, virtual_ms: float) -> int:
        """Return the moment of ``perf_counter_ns`` at which the engine's clock shows ``virtual_ms``; needs a speed."""
        assert self._ns_per_ms is not None
        return self._epoch_ns + round(virtual_ms * self._ns_per_ms)

    def delivery_ms(self, prompt_tokens: int) -> float:
        """Return the API server's time to send a first token, in real ms; 0 at full speed."""
        real_ms = self._cost.delivery_ms(prompt_tokens)
        return 0.0 if self._ns_per_ms is None else real_ms * self._ns_per_ms / 1e6

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._generations) - len(self.scheduler.running)

    @property
    def kv_usage(self) -> float:
        return self.scheduler.cache.usage()

    def _accept_requests(self) -> None:
        for generation in self._aborts:
            self._abort(generation)
        self._aborts.clear()
        while self._arrivals and self._arrivals[0][0] <= self.now_ms:
            _, index = heapq.heappop(self._arrivals)
            arrived = self._generations.get(index)
            if arrived is not None:  # None: aborted meanwhile
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
        assert self._sleeper is not None
        self._idle = True
        if not self._arrivals:
            if not self._aborts:
                await self._sleeper.sleep_until(None)
        else:
            entry_ms = self._arrivals[0][0]
            await self._sleep_until(entry_ms)
            # An early wake-up is by an arrival or abort: the next entry may differ.
            if self._ns_per_ms is None or self.clock_ms() >= entry_ms:
                self.now_ms = max(self.now_ms, entry_ms)
        self._idle = False

    def _wake(self) -> None:
        if self._idle and self._sleeper is not None:
            self._sleeper.wake()

    async def _deliver(self, step: Step) -> None:
        """Deliver the tokens that a scheduler step sampled."""
        if self._ns_per_ms is not None:
            self.counters.count_lateness(max(0, perf_counter_ns() - self.moment_ns(self.now_ms)) / 1e9)
        generations = self._generations
        sampled = [
            generations[share.request.index]
            for share in step.shares[: step.count]
            if share.samples and not share.request.is_finished()
        ]
        # First tokens are delivered before decodes: TTFT does not wait for the batch.
        beginning = [generation for generation in sampled if not generation.delivered]
        if beginning:
            sampled = beginning + [generation for generation in sampled if generation.delivered]
        for first in range(0, len(sampled) or 1, DELIVERED_PER_TURN):
            self._deliver_batch(sampled[first : first + DELIVERED_PER_TURN])
            if first + DELIVERED_PER_TURN >= len(sampled):
                self._unflushed = step
            await asyncio.sleep(0)

    def _deliver_batch(self, generations: list[Generation]) -> None:
        delivered = self._delivered
        for generation in generations:
            if generation.outcome is None:
                generation.delivered += 1
                if generation.delivered == len(generation.output.token_ids):
                    generation.outcome = "finished"
                delivered.append(generation)
                generation.on_progress(generation)

    def flush(self) -> None:
        """Update the scheduler with a delivered step; readers of its state call this first."""
        step, self._unflushed = self._unflushed, None
        if step is None:
            return
        delivered, self._delivered = self._delivered, []
        self.scheduler.finish_step(step)
        if self.on_first is not None:
            for generation in delivered:
                if not generation.token_ms:
                    self.on_first(generation)
        self.counters.count_step(delivered, self.now_ms)
        for generation in delivered:
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
