"""API server in front of the scheduler, on a separate core or on the engine's core. mypyc compiles this module.

On a shared core the API server and the engine each get half of the core while both have work. API server work during a
scheduler step is counted in the row of the step, other work in a separate row: so the latency model stays linear.
"""

from typing import Final

from mypy_extensions import i64

from sim.engine.simulatedrequest import SimulatedRequest
from sim.latency.stepcost import StepCost

PARALLEL: Final = 0
SHARED_CORE: Final = 2
PLACEMENTS: Final = ("parallel", "serial", "shared_core")
DONE_MS: Final = 1e-9
"""Remaining work that is only rounding error, in ms."""


class EntryClock:
    """Times at which requests enter the scheduler from an API server on a separate core, in virtual or real time.

    ``is_serial``: the API server works on one request at a time, as an event loop does; else on all at once.
    """

    def __init__(self, is_serial: bool) -> None:
        self._is_serial: bool = is_serial
        self._free_ms: float = float("-inf")

    def entry_ms(self, arrival_ms: float, work_ms: float) -> float:
        """Return the time at which a request enters the scheduler's waiting queue."""
        if not self._is_serial:
            return arrival_ms + work_ms
        self._free_ms = max(arrival_ms, self._free_ms) + work_ms
        return self._free_ms


class ApiServer:
    """API server of an engine; ``cost`` counts its work, per request and per prompt token."""

    def __init__(self, cost: StepCost, placement: i64) -> None:
        self.placement: i64 = placement
        self.done: list[SimulatedRequest] = []
        """Requests received on a shared core that are not queued yet, with ``received_ms``."""
        self.resumes_ms: float = 0.0
        """Time of the next event in a paused step."""
        self._cost: StepCost = cost
        self._clock: EntryClock = EntryClock(placement != PARALLEL)
        self._jobs: list[SimulatedRequest] = []
        """Requests that wait for the shared core, from ``_first`` on."""
        self._first: i64 = 0

    def work_ms(self, request: SimulatedRequest) -> float:
        """Return the time to receive a request, in ms: base and per prompt token."""
        return self._cost.reception_ms(request.prompt_tokens) * request.frontend_factor

    def entry_ms(self, request: SimulatedRequest) -> float:
        """Return the time at which a request leaves an API server on a separate core for the scheduler."""
        return self._clock.entry_ms(request.arrival_ms, self.work_ms(request))

    def accept(self, request: SimulatedRequest) -> None:
        """Queue a request for the shared core."""
        self._jobs.append(request)
        request.left_ms = self.work_ms(request)

    def is_busy(self) -> bool:
        return self._first < i64(len(self._jobs))

    def left_ms(self) -> float:
        """Return the remaining work on the current request, in ms."""
        return self._jobs[self._first].left_ms

    def run_beside(self, now_ms: float, left_ms: float, until_ms: float, pause_ms: float) -> tuple[float, float]:
        """Share the core until ``left_ms`` of the scheduler step's work are done, or until ``until_ms``; return the
        time and the remaining work.

        A fleet's engine pauses before a span that would end after ``pause_ms``: the arithmetic is independent of
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
        """Run while the engine is idle, to the end of the current request or to ``until_ms``; return the time."""
        end_ms = min(now_ms + self.left_ms(), until_ms)
        self._work(end_ms - now_ms, end_ms)
        return end_ms

    def _work(self, span_ms: float, now_ms: float) -> None:
        """Do ``span_ms`` of work on the current request up to ``now_ms``; finish it if no work remains."""
        request = self._jobs[self._first]
        work_ms = self.work_ms(request)
        request.left_ms -= span_ms
        if request.left_ms <= DONE_MS or now_ms + request.left_ms == now_ms:
            self._first += 1
            request.received_ms = now_ms
            self.done.append(request)
            if self._first == i64(len(self._jobs)):
                self._jobs.clear()
                self._first = 0
        share = span_ms / work_ms if work_ms > 0.0 else 1.0
        self._cost.count_reception(share, share * float(request.prompt_tokens))
