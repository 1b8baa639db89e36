"""Messages between a run's parent and its workers: Setup, Ready, Go, Progress …, Done; Stop at any time.

Pickled: both ends are this program, started by the same user.
"""

import pickle
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.core.job import Job, Shard
from loadgen.core.settings import RunSettings
from measure.live_counts import Counts, LiveCounts, Recent
from tracefile.records.schema import Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Parent → worker, first: data to open its shard and its connections.

    Secrets travel over the socket between the processes, never as arguments.
    """

    settings: RunSettings
    job: Job
    shard: Shard
    trace: Path
    """The run's trace, or this worker's part of it."""
    overwrite: bool = False
    """True if a file at ``trace`` may be replaced."""
    parallel: int | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """Worker → parent: shard opened, engine connected."""

    digest_share: int
    planned: int | None
    """Null: unknown."""
    last_send_ms: float | None = None
    """Planned time of the last send. Null: responses decide."""


@dataclass(frozen=True, slots=True)
class Go:
    """Parent → worker: time of t = 0."""

    t0_ns: int | None
    """On the machine's ``perf_counter_ns``; null: the worker is on another machine."""
    t0_unix_ns: int
    """On the clock of the worker's machine."""
    meta: Meta


@dataclass(frozen=True, slots=True)
class Stop:
    """Parent → worker: send nothing more, abort and record the requests in flight, end."""

    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Worker → parent, four times a second: total counts, and latency samples since the last Progress."""

    counts: Counts
    recent: Recent


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Worker → parent, last: all requests have ended, the worker's trace is complete."""

    tally: LiveCounts
    findings: dict[str, int]
    stopped: str | None
    """Null: not interrupted."""
    seconds: float
    """From t = 0 to the last end."""
    cpu_s: float
    loop_delay_ms: "array[float]" = field(default_factory=lambda: array("d"))
    """Event-loop delay in ms, sampled 20 times a second: error of read time stamps."""
    follow_up_delay_ms: "array[float]" = field(default_factory=lambda: array("d"))
    """Delay from a response's end until its follow-up is planned."""
    reason: str = ""
    """The engine's message for the first refused request; never written."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Worker → parent, last: the worker could not start, or could not continue."""

    text: str
    is_input: bool


FromParent = Setup | Go | Stop
FromWorker = Ready | Progress | Done | Failed


def encode(message: FromParent | FromWorker) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def decode(payload: bytes) -> FromParent | FromWorker:
    message: FromParent | FromWorker = pickle.loads(payload)
    return message
