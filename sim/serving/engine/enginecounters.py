"""Counters of a real-time engine for ``/metrics``, beside its scheduler's statistics."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from measure.histogram import HistogramCounts, add_value, empty_counts
from sim.serving.requests.generation import Generation

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
"""Upper bounds of the buckets of TTFT, ITL and request latency, seconds; vLLM's."""
LATENESS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 1.0)
"""Upper bounds of the buckets of a step's lateness, seconds."""


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start; the times are the engine's clock's."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
    ttft_s: HistogramCounts = field(default_factory=lambda: empty_counts(SECONDS))
    itl_s: HistogramCounts = field(default_factory=lambda: empty_counts(SECONDS))
    e2e_s: HistogramCounts = field(default_factory=lambda: empty_counts(SECONDS))
    lateness_s: HistogramCounts = field(default_factory=lambda: empty_counts(LATENESS_S))
    """Delay of each step's first token against the model's time; nothing is late at full speed."""

    def count_lateness(self, late_s: float) -> None:
        """Count the lateness of one step."""
        add_value(self.lateness_s, LATENESS_S, late_s)

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
            add_value(self.itl_s, SECONDS, (now_ms - before_ms) / 1e3, times_seen)

    def count_finished(self, generation: Generation, now_ms: float) -> None:
        """An answer is complete."""
        self.finished[generation.answer.finish_reason] += 1
        add_value(self.e2e_s, SECONDS, (now_ms - generation.arrival_ms) / 1e3)

    def _count_first(self, generation: Generation, now_ms: float) -> None:
        request = generation.request
        self.prompt_tokens += request.prompt_tokens
        self.cached_prompt_tokens += request.cached_tokens or 0
        add_value(self.ttft_s, SECONDS, (now_ms - generation.arrival_ms) / 1e3)
