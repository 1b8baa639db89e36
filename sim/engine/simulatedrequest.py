"""A request in a simulation: what the scheduler has of it, and what its client sees. mypyc compiles this module."""

from math import inf, isnan, nan
from typing import Final

from librt.vecs import append, pop, vec
from mypy_extensions import i64

from sim.vllm.request import Request

NO_OUTCOME: Final = 0
OK: Final = 1
ABORTED: Final = 2
UNSERVABLE: Final = 3
PARENT_FAILED: Final = 4
AS_RECORDED: Final = 5
LOST: Final = 6
"""Its engine died while it streamed."""
NO_ENGINE: Final = 7
"""No engine was up when it came."""
OUTCOMES: Final = ("", "ok", "aborted", "unservable", "parent_failed", "as_recorded", "lost", "no_engine")


class SimulatedRequest(Request):
    """Request from its arrival to its end. NaN: not yet, or never.

    ``children``: requests that wait for its end. ``think_ms``: from the end of its parent to its arrival.
    ``abort_after_ms``: from its arrival to when its client goes. ``recorded_e2e_ms``: of a request that failed before
    an engine got it, and ends as recorded.
    """

    outcome: i64 = NO_OUTCOME
    has_parent: bool = False
    """It waits for the end of another request."""
    is_as_recorded: bool = False
    think_ms: float = nan
    next_think_ms: float = inf
    """Of a fleet: from its end to the first arrival that waits for it."""
    abort_after_ms: float = nan
    recorded_e2e_ms: float = nan
    frontend_factor: float = 1.0
    """Factor of noise on the API server's time."""
    entry_ms: float = nan
    """When the scheduler got it."""
    admitted_ms: float = nan
    ttft_ms: float = nan
    e2e_ms: float = nan
    received_ms: float = nan
    """When the API server on a shared core had received it."""
    left_ms: float = 0.0
    """Work of the API server on it that is left, on a shared core."""
    has_arrived: bool = False
    """An engine got it."""
    num_seen: i64 = 0
    """Tokens that its client has got."""
    life: i64 = -1
    """Of a fleet: number of the engine's life that it was handed to; −1: none."""

    def prepare(self) -> None:
        """Make room for what comes to be known of it."""
        self.served: SimulatedRequest | None = None
        """Of a fleet: the request as its engine has it."""
        self.children: list[SimulatedRequest] = []
        self.token_runs: vec[i64] = vec[i64]()
        """First step and number of consecutive steps, each with one of its tokens; the last ones are in ``run_…``."""
        self.run_start: i64 = 0
        self.run_end: i64 = 0

    def again(self) -> "SimulatedRequest":
        """Return a copy of the request before its arrival, without the turns that wait for it."""
        request = SimulatedRequest(
            self.request_id,
            self.prompt_tokens,
            self.last_token - self.prompt_tokens,
            self.keys,
            first_key=self.first_key,
            known_keys=self.known_keys,
            index=self.index,
            hit_limit=self.hit_limit,
        )
        request.prepare()
        request.abort_after_ms = self.abort_after_ms
        request.next_think_ms = self.next_think_ms
        return request

    def as_served(self) -> "SimulatedRequest":
        """Return the request as its engine has it, with what the router saw of it; itself if no engine got it."""
        served = self.served
        if served is None:
            return self
        served.outcome = self.outcome
        served.arrival_ms = self.arrival_ms
        served.num_seen = self.num_seen
        served.ttft_ms = self.ttft_ms
        served.e2e_ms = self.e2e_ms
        return served

    def see_tokens(self, step: i64, count: i64) -> None:
        """Note a token in each of ``count`` steps from ``step`` on."""
        if step != self.run_end or self.run_start == self.run_end:
            self.close_run()
            self.run_start = step
        self.run_end = step + count
        self.num_seen += count

    def close_run(self) -> None:
        """Move the last run of consecutive steps to the others."""
        if self.run_end > self.run_start:
            self.token_runs = append(append(self.token_runs, self.run_start), self.run_end - self.run_start)
        self.run_start = self.run_end

    def forget_unseen(self, seen_ms: vec[float], left_ms: float) -> None:
        """Drop tokens that came after the client had gone; ``seen_ms``: when clients see a step's tokens."""
        while self.num_seen > 0 and seen_ms[self.run_end - 1] > left_ms:
            self.run_end -= 1
            self.num_seen -= 1
            if self.run_end == self.run_start and len(self.token_runs) > 0:
                self.token_runs, count = pop(self.token_runs)
                self.token_runs, self.run_start = pop(self.token_runs)
                self.run_end = self.run_start + count

    def note_seen(self, seen_ms: vec[float]) -> None:
        """Note when the client saw its first and its last token."""
        self.ttft_ms = self.first_seen_ms(seen_ms) - self.arrival_ms
        self.e2e_ms = seen_ms[self.run_end - 1] - self.arrival_ms

    def first_seen_ms(self, seen_ms: vec[float]) -> float:
        """Return the time at which the client saw its first token."""
        return seen_ms[self.token_runs[0] if len(self.token_runs) > 0 else self.run_start]

    def end_ms(self) -> float:
        """Return the time at which it ended."""
        return self.arrival_ms + (0.0 if isnan(self.e2e_ms) else self.e2e_ms)
