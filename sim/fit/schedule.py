"""Schedule of a capture: its engine's steps, and each request's way through the scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sim.latency.terms import StepRow
from sim.vllm.request import Request
from sim.workload.arrivals import Arrival


@dataclass(slots=True)
class Admitted:
    """Result of the rules for a captured request."""

    arrival: Arrival
    request: Request | None = None
    """None: the engine never got it, or could not serve it."""
    admitted_ms: float | None = None
    """When the step was composed that first served it. None: none did."""
    cached_tokens: int | None = None
    preemptions: int = 0
    steps_off: int = 0
    """How many steps after the one that samples its first token here that token was seen; negative: before it."""


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step of the schedule. Times on the trace's clock, ms; approximate where no token was seen."""

    start_ms: float
    end_ms: float
    row: StepRow
    """Its count of every term (``sim.latency.terms``)."""
    sampling: list[tuple[int, int]]
    """Places of those it samples, and which of their tokens."""
    largest: int
    """Place of the request that has most tokens in it."""
    opener: int | None
    """Place of the request whose arrival ended the idleness before it; it began no sooner than that. None: it followed
    on another step."""
    continues: bool
    """Some of its requests had been served before. If not, they may still have been in the API server's hands when it
    could have begun."""


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """A schedule that was run; outcomes are in the order of arrivals."""

    outcomes: list[Admitted]
    steps: int
    preemptions: int
    evicted_blocks: int
    shifted: dict[int, int]
    """Who was admitted how many steps later than its first token says, by place."""
    timeline: list[CapturedStep]
    """The steps, in order."""

    @property
    def misfits(self) -> int:
        return sum(1 for outcome in self.outcomes if outcome.steps_off)


@dataclass(slots=True)
class StepAhead:
    """State of a step after the requests that are surely in it."""

    budget: int
    """Tokens that it has left."""
    most_per_request: int
    block_size: int
    sampling: list[tuple[int, int]] = field(default_factory=list)
    """Places of the sampled requests, and the number of the token of each."""
    filled: set[int] = field(default_factory=set)
    """Keys of blocks that get full in it: requests later in the step hit them."""

    def add(self, place: int, token: int, hashes: Sequence[int], depth: int, tokens: int) -> None:
        """Serve a request that has ``depth`` tokens and lacks ``tokens``, as far as the budget goes."""
        share = min(tokens, self.most_per_request, self.budget)
        self.budget -= share
        if share == tokens > 0:
            self.sampling.append((place, token))
        if share > 1:
            self.filled.update(hashes[depth // self.block_size : (depth + share) // self.block_size])
