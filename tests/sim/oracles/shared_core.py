"""A front end on the engine's core: each gets half of the core while both have work.

The front end takes requests one at a time. What it does while a step runs makes the step longer by as much, and is
counted in that step's row; what it does while the engine is idle gets a row of its own. So every moment between an
arrival and its first token is in some row, and the parameters stay linear.
"""

from collections import deque
from dataclasses import dataclass

from tests.sim.oracles.readable.rows import count_reception

_DONE_MS = 1e-9  # maximum rounding residue of a job


@dataclass(slots=True)
class Job:
    """One request in the front end's hands."""

    position: int
    prompt_tokens: int
    work_ms: float
    left_ms: float


class SharedCore:
    """The front end's queue, and the slowdown of its jobs and the engine's steps by each other."""

    __slots__ = ("_done", "_jobs")

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._done: list[tuple[float, int]] = []

    def accept(self, position: int, prompt_tokens: int, work_ms: float) -> None:
        """A request has arrived."""
        self._jobs.append(Job(position, prompt_tokens, work_ms, work_ms))

    def pop_done(self) -> list[tuple[float, int]]:
        """When and which requests were handed over since the last call."""
        done, self._done = self._done, []
        return done

    @property
    def is_busy(self) -> bool:
        """Whether any request is in the front end's hands."""
        return bool(self._jobs)

    def run_beside(self, start_ms: float, step_ms: float, until_ms: float, row: list[float]) -> tuple[float, float]:
        """Run from ``start_ms`` until ``step_ms`` of the engine's work are done, or until ``until_ms``.

        Returns the time reached and the engine's work that is left; ``row`` counts the front end's work.
        """
        now_ms, left_ms = start_ms, step_ms
        while left_ms > 0.0 and now_ms < until_ms:
            if not self._jobs:
                span_ms = min(left_ms, until_ms - now_ms)
                now_ms, left_ms = now_ms + span_ms, left_ms - span_ms
                continue
            span_ms = min(2.0 * left_ms, 2.0 * self._jobs[0].left_ms, until_ms - now_ms)
            now_ms += span_ms
            left_ms = max(left_ms - span_ms / 2.0, 0.0)
            self._work(span_ms / 2.0, now_ms, row)
        return now_ms, left_ms

    def run_alone(self, start_ms: float, until_ms: float, row: list[float]) -> float:
        """Run while the engine is idle, to the end of the current job or to ``until_ms``; the time reached."""
        end_ms = min(start_ms + self._jobs[0].left_ms, until_ms)
        self._work(end_ms - start_ms, end_ms, row)
        return end_ms

    def _work(self, span_ms: float, now_ms: float, row: list[float]) -> None:
        """Do ``span_ms`` of the current job, which ends at ``now_ms`` if no work remains."""
        job = self._jobs[0]
        job.left_ms -= span_ms
        if job.left_ms <= _DONE_MS or now_ms + job.left_ms == now_ms:
            self._jobs.popleft()
            self._done.append((now_ms, job.position))
        share = span_ms / job.work_ms if job.work_ms > 0.0 else 1.0
        count_reception(row, share, share * job.prompt_tokens)
