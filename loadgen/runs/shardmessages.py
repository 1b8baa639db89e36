"""Messages between a run's parent and its shards: Setup, Ready, Go, Progress …, Done; Stop at any time.

They are pickled: both ends are this program, started by the same user. Over a socket each message has its length
before it (``wire/process.py``); a Ray actor takes and gives the messages themselves.
"""

import pickle
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.core.job import Job, Shard
from measure.tally import Counts, Recent, Tally
from tracefile import Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Parent → shard, first: all that it needs to open its part and its connections."""

    job: Job
    shard: Shard
    url: str
    trace: Path
    """What this shard writes: the trace itself, or its part of it."""
    overwrite: bool = False
    """Whether there may be a file at ``trace`` to be replaced."""
    parallel: int | None = None
    """Most requests in flight in this shard; null: no limit."""
    timeout_s: float | None = None
    """Longest request; null: no limit."""
    resumed: Path | None = None
    """What an earlier part of the run recorded and is kept; null: nothing. Equal to ``trace``: go on writing there."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Shard → parent: opened and connected."""

    digest_share: int
    planned: int | None
    """Requests it will send; null: unknown."""


@dataclass(frozen=True, slots=True)
class Go:
    """Parent → shard: t = 0 is then. ``meta.epoch_unix_ns`` is the trace's zero: ``t0_unix_ns`` unless resumed."""

    t0_ns: int | None
    """On this machine's ``perf_counter_ns``, which all its processes share; null: the shard is on another machine."""
    t0_unix_ns: int
    meta: Meta
    """The trace's header."""
    from_ms: float = 0.0
    """Time in the plan at which a resumed run continues: t0 lies that long before now; earlier requests are due now."""


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
    """SHA-256 of every body that was sent, with how long after its cause it was due, summed as digest shares are."""
    stopped: str | None
    """Why it was cut short; null: it was not."""
    seconds: float
    """From t = 0 to the last end."""
    shard_cpu_s: float
    sender_cpu_s: float
    loop_delay_ms: "array[float]" = field(default_factory=lambda: array("d"))
    """How late a timer rang in the sender, sampled twenty times a second: what a read may have waited for its stamp."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Shard → parent, last: it could not be run, or no further."""

    text: str
    """One line for the user."""
    is_input: bool
    """Whether the user's input is what was wrong."""


FromParent = Setup | Go | Stop
FromShard = Ready | Progress | Done | Failed


def encode(message: FromParent | FromShard) -> bytes:
    """The message as one frame's payload."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def decode(payload: bytes) -> FromParent | FromShard:
    message: FromParent | FromShard = pickle.loads(payload)
    return message
