"""Messages between a run's parent and its shards: Setup, Ready, Go, Progress …, Done; Stop at any time.

They are pickled: both ends are this program, started by the same user.
"""

import pickle
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from engines.access import OPEN, Access
from loadgen.core.job import Job, Shard
from measure.tally import Counts, Recent, Tally
from tracefile import Meta

UNSENT = "unsent"
"""Finding that counts requests that were due at the end, without a free slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Parent → shard, first: all that it needs to open its part and its connections."""

    job: Job
    shard: Shard
    url: str
    access: Access = OPEN
    """Its secrets travel over the socket between the processes, never as arguments."""
    trace: Path
    """The trace itself, or this shard's part of it."""
    overwrite: bool = False
    """True if a file at ``trace`` may be replaced."""
    parallel: int | None = None
    timeout_s: float | None = None
    """Null: no limit."""
    ends_ms: float | None = None
    """Time in the plan when all that is left is cancelled; null: it finishes."""
    resumed: Path | None = None
    """Records of an earlier run that are kept; null: none. Equal to ``trace``: append there."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Shard → parent: opened and connected."""

    digest_share: int
    planned: int | None
    """Null: unknown."""
    last_send_ms: float | None = None
    """Time of the plan's last send. Null: responses decide."""


@dataclass(frozen=True, slots=True)
class Go:
    """Parent → shard: t = 0 is then. ``meta.epoch_unix_ns`` is the trace's zero: ``t0_unix_ns`` unless resumed."""

    t0_ns: int | None
    """On the machine's ``perf_counter_ns``; null: the shard is on another machine."""
    t0_unix_ns: int
    meta: Meta
    from_ms: float = 0.0
    """Time in the plan at which a resumed run continues; earlier requests are due now."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Parent → shard: send nothing more, abort what is in flight, record it, and be done."""

    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Shard → parent, four times a second. Counts are totals; samples are those since the last Progress."""

    counts: Counts
    recent: Recent


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Shard → parent, last: all has ended, and the shard's trace is complete."""

    tally: Tally
    findings: dict[str, int]
    sent_share: int
    """Sum of SHA-256 of every sent body and its due time after its cause."""
    stopped: str | None
    """Null: not cut short."""
    seconds: float
    """From t = 0 to the last end."""
    shard_cpu_s: float
    sender_cpu_s: float
    loop_delay_ms: "array[float]" = field(default_factory=lambda: array("d"))
    """Lateness of a timer in the sender, twenty times a second: the delay of a read's time stamp."""
    crossing_delay_ms: "array[float]" = field(default_factory=lambda: array("d"))
    """From responses' ends in the sender to the shard that builds what follows, once a batch."""
    reason: str = ""
    """The engine's words for the first request that it refused; never written."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Shard → parent, last: it could not be run, or no further."""

    text: str
    is_input: bool


FromParent = Setup | Go | Stop
FromShard = Ready | Progress | Done | Failed


def encode(message: FromParent | FromShard) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def decode(payload: bytes) -> FromParent | FromShard:
    message: FromParent | FromShard = pickle.loads(payload)
    return message
