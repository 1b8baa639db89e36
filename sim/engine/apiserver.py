"""API server before the scheduler, on a core of its own or on the engine's. mypyc compiles this module.

On the engine's core each of the two gets half of it while the other has work. The API server's work during a step is
counted in that step's row, other work in a row of its own: so the model stays linear.
"""

from typing import Final

from mypy_extensions import i64

from sim.engine.simulatedrequest import SimulatedRequest
from sim.latency.stepcost import StepCost

PARALLEL: Final = 0
SHARED_CORE: Final = 2
PLACEMENTS: Final = ("parallel", "serial", "shared_core")
DONE_MS: Final = 1e-9
"""Rounding may leave so much of a job; far from t = 0, as much as does not move the clock any more."""


class EntryClock:
    """Times at which requests leave an API server on a core of its own, in virtual and in real time alike.

    ``is_serial``: it works on one request at a time, as one event loop does; else on all at once.
    """

    def __init__(self, is_serial: bool) -> None:
        self._is_serial: bool = is_serial
        self._free_ms: float = float("-inf")

    def entry_ms(self, arrival_ms: float, work_ms: float) -> float:
        """Return the time at which the scheduler gets a request."""
        if not self._is_serial:
            return arrival_ms + work_ms
        self._free_ms = max(arrival_ms, self._free_ms) + work_ms
        return self._free_ms


class ApiServer:
    """API server of one engine; ``cost`` also counts its work."""

    def __init__(self, cost: StepCost, placement: i64) -> None:
        self.placement: i64 = placement
        self.done: list[SimulatedRequest] = []
        """Requests received on a shared core and not yet handed over, each with its ``received_ms``."""
        self.resumes_ms: float = 0.0
        """Time before which nothing happens in a step that pauses."""
        self._cost: StepCost = cost
        self._clock: EntryClock = EntryClock(placement != PARALLEL)
        self._jobs: list[SimulatedRequest] = []
        """Requests that wait for the shared core, from ``_first`` on."""
        self._first: i64 = 0

    def work_ms(self, request: SimulatedRequest) -> float:
        """Return the time that receiving the request takes."""
        return self._cost.reception_ms(request.prompt_tokens) * request.frontend_factor

    def entry_ms(self, request: SimulatedRequest) -> float:
        """Return the time at which an API server on a core of its own hands the request over."""
        return self._clock.entry_ms(request.arrival_ms, self.work_ms(request))

    def accept(self, request: SimulatedRequest) -> None:
        """Let the request wait for the shared core."""
        self._jobs.append(request)
        request.left_ms = self.work_ms(request)

    def is_busy(self) -> bool:
        """Return whether a request waits for the shared core."""
        return self._first < i64(len(self._jobs))

    def left_ms(self) -> float:
        """Return the rest of the job in hand."""
        return self._jobs[self._first].left_ms

    def run_beside(self, now_ms: float, left_ms: float, until_ms: float, pause_ms: float) -> tuple[float, float]:
        """Run until ``left_ms`` of the engine's work are done, or until ``until_ms``; return the time and the rest.

        A fleet's engine pauses before a span that would end after ``pause_ms``: the arithmetic does not depend on
        pauses.
        """
        while left_ms > 0.0 and now_ms < until_ms:
            alone = not self.is_busy()
            span_ms = min(left_ms, until_ms - now_ms)
            if not alone:
                span_ms = min(2.0 * left_ms, 2.0 * self.left_ms(), until_ms - now_ms)
            if now_ms + span_ms > pause_ms:
                self.resumes_ms = now_ms + span_ms
                break
            now_ms += span_ms
            if alone:
                left_ms -= span_ms
                continue
            left_ms = max(left_ms - span_ms / 2.0, 0.0)
            self._work(span_ms / 2.0, now_ms)
        return now_ms, left_ms

    def run_alone(self, now_ms: float, until_ms: float) -> float:
        """Run while the engine is idle, to the end of the job in hand or to ``until_ms``; return the time."""
        end_ms = min(now_ms + self.left_ms(), until_ms)
        self._work(end_ms - now_ms, end_ms)
        return end_ms

    def _work(self, span_ms: float, now_ms: float) -> None:
        """Do ``span_ms`` of the job in hand, which ends at ``now_ms`` if that is the rest of it."""
        request = self._jobs[self._first]
        whole_ms = self.work_ms(request)
        request.left_ms -= span_ms
        if request.left_ms <= DONE_MS or now_ms + request.left_ms == now_ms:
            self._first += 1
            request.received_ms = now_ms
            self.done.append(request)
            if self._first == i64(len(self._jobs)):
                self._jobs.clear()
                self._first = 0
        share = span_ms / whole_ms if whole_ms > 0.0 else 1.0
        self._cost.count_reception(share, share * float(request.prompt_tokens))
