"""Simulated request: scheduler state, and tokens and latencies as its client sees them. mypyc compiles this module."""

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
"""The engine died during the stream."""
NO_ENGINE: Final = 7
"""No engine was up at the arrival."""
OUTCOMES: Final = ("", "ok", "aborted", "unservable", "parent_failed", "as_recorded", "lost", "no_engine")


class SimulatedRequest(Request):
    """Request from arrival to end, with its scheduler state. NaN: not yet, or never.

    ``children``: later turns, which wait for its end. ``think_ms``: think time, from the parent's end to the arrival.
    ``abort_after_ms``: from the arrival to the client's abort. ``recorded_e2e_ms``: E2E latency of a request that
    failed before it reached an engine, and ends as recorded.
    """

    outcome: i64 = NO_OUTCOME
    has_parent: bool = False
    """True: a later turn, which waits for its parent's end."""
    is_as_recorded: bool = False
    think_ms: float = nan
    next_think_ms: float = inf
    """In a fleet: shortest think time of its children."""
    abort_after_ms: float = nan
    recorded_e2e_ms: float = nan
    frontend_factor: float = 1.0
    """Noise factor on the API server's time."""
    entry_ms: float = nan
    """Time at which the request entered the scheduler's waiting queue."""
    admitted_ms: float = nan
    ttft_ms: float = nan
    e2e_ms: float = nan
    received_ms: float = nan
    """Time at which the API server on a shared core had received the request."""
    left_ms: float = 0.0
    """Remaining API server work, on a shared core."""
    has_arrived: bool = False
    """The request reached an engine."""
    num_delivered: i64 = 0
    """Tokens that the client has received."""
    life: i64 = -1
    """In a fleet: index of the engine's life that serves the request; −1: none."""

    def prepare(self) -> None:
        """Initialise the mutable fields: children, tokens by step."""
        self.served: SimulatedRequest | None = None
        """In a fleet: the copy that the engine serves."""
        self.children: list[SimulatedRequest] = []
        self.token_runs: vec[i64] = vec[i64]()
        """Runs of consecutive steps that each delivered a token: first step and count. The last run is in ``run_…``."""
        self.run_start: i64 = 0
        self.run_end: i64 = 0

    def copy_for_engine(self) -> "SimulatedRequest":
        """Return a copy for an engine's scheduler, before arrival and without children."""
        request = SimulatedRequest(
            self.request_id,
            self.prompt_tokens,
            self.last_token - self.prompt_tokens,
            self.keys,
            first_key=self.first_key,
            num_keys=self.num_keys,
            index=self.index,
            hit_limit=self.hit_limit,
        )
        request.prepare()
        request.abort_after_ms = self.abort_after_ms
        request.next_think_ms = self.next_think_ms
        return request

    def as_served(self) -> "SimulatedRequest":
        """Return the engine's copy with latencies as the router sees them; itself if no engine served it."""
        served = self.served
        if served is None:
            return self
        served.outcome = self.outcome
        served.arrival_ms = self.arrival_ms
        served.num_delivered = self.num_delivered
        served.ttft_ms = self.ttft_ms
        served.e2e_ms = self.e2e_ms
        return served

    def add_tokens(self, step: i64, count: i64) -> None:
        """Add a token in each of ``count`` steps from ``step`` on."""
        if step != self.run_end or self.run_start == self.run_end:
            self.close_run()
            self.run_start = step
        self.run_end = step + count
        self.num_delivered += count

    def close_run(self) -> None:
        """Append the last run of token steps to ``token_runs``."""
        if self.run_end > self.run_start:
            self.token_runs = append(append(self.token_runs, self.run_start), self.run_end - self.run_start)
        self.run_start = self.run_end

    def drop_undelivered(self, delivered_ms: vec[float], left_ms: float) -> None:
        """Drop tokens that would arrive after the client left; ``delivered_ms``: arrival time of each step's tokens."""
        while self.num_delivered > 0 and delivered_ms[self.run_end - 1] > left_ms:
            self.run_end -= 1
            self.num_delivered -= 1
            if self.run_end == self.run_start and len(self.token_runs) > 0:
                self.token_runs, count = pop(self.token_runs)
                self.token_runs, self.run_start = pop(self.token_runs)
                self.run_end = self.run_start + count

    def set_latencies(self, delivered_ms: vec[float]) -> None:
        """Set TTFT and E2E latency from the delivery of the first and the last token."""
        self.ttft_ms = self.first_token_ms(delivered_ms) - self.arrival_ms
        self.e2e_ms = delivered_ms[self.run_end - 1] - self.arrival_ms

    def first_token_ms(self, delivered_ms: vec[float]) -> float:
        """Return the time at which the client receives the first token."""
        return delivered_ms[self.token_runs[0] if len(self.token_runs) > 0 else self.run_start]

    def end_ms(self) -> float:
        return self.arrival_ms + (0.0 if isnan(self.e2e_ms) else self.e2e_ms)
