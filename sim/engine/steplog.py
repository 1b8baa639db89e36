"""Log of the engine's steps: the compiled loop runs a step or two at a time, and each is written with its load."""

from collections.abc import Callable

import msgspec

from measure.enginesteps import EngineStep
from sim.kernels.layout import SimState, Timeline
from sim.kernels.loop import FULL, run_as_needed
from sim.latency.terms import DECODES, PREFILL_TOKENS, STEPS, decode_kv_tokens

DECIMALS = 4
_TWO = 2
"""Steps that the loop takes at once at most in a timeline that has room for one: a decode step repeats unseen."""


class StepLog:
    """A replacement of ``loop.run_as_needed`` that hands each step, as a line, to ``take``. The result is the same."""

    def __init__(self, take: Callable[[bytes], None], run_on: Callable[[SimState], int] = run_as_needed) -> None:
        self._take = take
        self._run_on = run_on
        self._written = 0
        self._encoder = msgspec.json.Encoder()

    def run(self, state: SimState) -> int:
        """Run until there is a reason to stop, as the loop does."""
        clock, timeline = state.clock[0], state.timeline
        while True:
            first = int(clock["num_steps"])
            short = Timeline(*(part[: first + _TWO] for part in timeline))
            stop = self._run_on(state._replace(timeline=short))
            end = int(clock["num_steps"])
            self._write(state, first, end)
            if stop != FULL or end == first or end + 1 >= len(timeline.ends_ms):
                return stop

    def catch_up(self, state: SimState) -> int:
        """Write a fleet's engine's steps since the last call; return how many its timeline may hold at the next."""
        end = int(state.clock["num_steps"][0])
        self._write(state, self._written, end)
        self._written = end
        return end + _TWO

    def end_life(self, state: SimState) -> None:
        """Write the steps left of an engine that ends, or that starts anew with an empty timeline."""
        self.catch_up(state)
        self._written = 0

    def _write(self, state: SimState, first: int, end: int) -> None:
        scheduler, timeline = state.scheduler, state.timeline
        queues, pool = scheduler.state[0], scheduler.pool
        used = int(scheduler.settings[0]["usable_blocks"]) - int(pool.counts[0]["num_free"])
        for step in range(first, end):
            row = timeline.rows[step]
            if not row[STEPS]:
                continue  # the API server's work while the engine was idle
            start_ms = float(timeline.starts_ms[step])
            logged = EngineStep(
                start_ms=round(start_ms, DECIMALS),
                duration_ms=round(float(timeline.ends_ms[step]) - start_ms, DECIMALS),
                prefill_tokens=int(row[PREFILL_TOKENS]),
                decodes=int(row[DECODES]),
                decode_kv_tokens=int(decode_kv_tokens(row)),
                running=int(queues["num_running"]),
                waiting=int(queues["num_waiting"]),
                used_blocks=used,
            )
            self._take(self._encoder.encode(logged) + b"\n")
