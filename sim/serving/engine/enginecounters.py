"""What ``/metrics`` counts of a real-time engine beside its scheduler's own statistics."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sim.serving.engine.histogram import Histogram
from sim.serving.requests.generation import Generation

LATENESS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 1.0)
"""Upper bounds of the buckets of how late steps' tokens go out, seconds."""


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start; the times are the engine's clock's."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
    ttft_s: Histogram = field(default_factory=Histogram)
    itl_s: Histogram = field(default_factory=Histogram)
    e2e_s: Histogram = field(default_factory=Histogram)
    lateness_s: Histogram = field(default_factory=lambda: Histogram(LATENESS_S))
    """How long after its time on the wall each step's first token was told; at full speed nothing is late."""

    def count_step(self, told: Sequence[Generation], now_ms: float) -> None:
        """A step that ended at ``now_ms`` gave each of ``told`` a token."""
        self.steps += 1
        self.generation_tokens += len(told)
        before: list[float] = []
        for generation in told:
            times = generation.token_ms
            if times:
                before.append(times[1])
                times[1] = now_ms
            else:
                generation.token_ms = [now_ms, now_ms]
                self._count_first(generation, now_ms)
        # Nearly all had their last token at the end of one step: a handful of gaps, however many streams.
        for before_ms, times_seen in Counter(before).items():
            self.itl_s.add((now_ms - before_ms) / 1e3, times_seen)

    def count_finished(self, generation: Generation, now_ms: float) -> None:
        """An answer is complete."""
        self.finished[generation.answer.finish_reason] += 1
        self.e2e_s.add((now_ms - generation.arrival_ms) / 1e3)

    def _count_first(self, generation: Generation, now_ms: float) -> None:
        request = generation.request
        self.prompt_tokens += request.prompt_tokens
        self.cached_prompt_tokens += request.cached_tokens or 0
        self.ttft_s.add((now_ms - generation.arrival_ms) / 1e3)
