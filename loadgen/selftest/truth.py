"""Orders to the built-in server, and its log of each request: the ground truth for a client.

All times are of the system's monotonic clock, which every process of a machine shares (``time.perf_counter_ns``). The
server notes when a request's last byte had come and when it wrote the first token, each just before it goes on, so a
client that says how long the first token took can only say more than the server knows: its TTFT error, never negative,
is the way there, the way back through the kernel, and however late the client was to look.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.core.draws import below, text_key
from tracefile import InputError

NS_PER_MS = 1_000_000
STEADY = (0.2, 0.95)
"""Part of a run, from first to last request, for rates: all clients have started and none has ended."""

Times = npt.NDArray[np.int64]
Sample = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times and pieces of the server's responses."""

    ttft_low_ms: float = 0.0
    ttft_high_ms: float = 0.0
    """From a request's last byte to the first token's write: drawn between the two by the request's id."""
    gap_ms: float = 0.0
    """Between two writes; 0: all at once."""
    tokens_per_write: int = 1
    """Events of later writes; the first write has one."""
    prompt_tokens: int = 256
    """What usage says of every prompt: the server does not read them."""

    def __post_init__(self) -> None:
        if not 0 <= self.ttft_low_ms <= self.ttft_high_ms < math.inf:
            raise InputError(
                f"--ttft-ms: {self.ttft_low_ms:g}:{self.ttft_high_ms:g}; expected MS or MIN:MAX, 0 or more"
            )
        if not 0 <= self.gap_ms < math.inf or self.tokens_per_write < 1 or self.prompt_tokens < 1:
            raise InputError(
                f"--gap-ms, --tokens-per-write, --prompt-tokens: {self.gap_ms:g}, {self.tokens_per_write}, "
                f"{self.prompt_tokens}; expected 0 or more, 1 or more, 1 or more"
            )

    def ttft_ns(self, request_id: str) -> int:
        """Return the TTFT of a request, drawn by its id."""
        low_ns, high_ns = (round(bound * NS_PER_MS) for bound in (self.ttft_low_ms, self.ttft_high_ms))
        return low_ns + below(text_key(request_id), high_ns - low_ns + 1)


class Served(msgspec.Struct, frozen=True, array_like=True):
    """Request as the server saw it, in ns of the monotonic clock; null: it did not come to that."""

    request_id: str
    """As its ``X-Request-Id`` says; its number, ``#7``, if it has none."""
    received_ns: int
    """Clock at the start of the read that brought its last byte."""
    due_ns: int
    """When the first token was to be written."""
    first_write_ns: int | None
    """Clock just before the first token's bytes went to the kernel."""
    last_write_ns: int | None
    """The same of the stream's end."""
    tokens: int
    """As asked for."""
    writes: int
    """Pieces that the whole stream has."""

    @property
    def ttft_ns(self) -> int | None:
        return None if self.first_write_ns is None else self.first_write_ns - self.received_ns

    @property
    def lateness_ns(self) -> int | None:
        """Delay of the server's own write; not an error of the client, which is compared with the actual write."""
        return None if self.first_write_ns is None else self.first_write_ns - self.due_ns


class Truth(msgspec.Struct, frozen=True):
    """Log of the server after a run."""

    served: list[Served]
    """In order of arrival."""
    cpu_ns: int
    """CPU time of the server's process so far."""
    started_ns: int
    """Clock when it began to listen."""
    told_ns: int
    """Clock when it said so."""


def received_ns(served: Sequence[Served]) -> Times:
    """Return the arrival times of the requests, in ns of the server's clock."""
    return np.array([one.received_ns for one in served], dtype=np.int64)


def steady_part(received: Times) -> tuple[int, int]:
    """Between which moments a run is neither starting nor ending; both 0 if it never was."""
    if not len(received):
        return 0, 0
    first, last = int(received.min()), int(received.max())
    start, end = (round(first + share * (last - first)) for share in STEADY)
    return start, end


def steady_rate(received: Times) -> float:
    """Requests a second over that part."""
    start, end = steady_part(received)
    return count_between(received, start, end) / (end - start) * 1e9 if end > start else 0.0


def count_between(received: Times, start_ns: int, end_ns: int) -> int:
    """Count arrivals from ``start_ns`` on and before ``end_ns``."""
    return int(np.count_nonzero((received >= start_ns) & (received < end_ns)))


def ttft_errors_ms(served: Sequence[Served], told_ns: Mapping[str, float]) -> Sample:
    """Return client TTFT − server TTFT for each request that both know."""
    return np.array(
        [
            (told_ns[one.request_id] - one.ttft_ns) / 1e6
            for one in served
            if one.request_id in told_ns and one.ttft_ns is not None
        ],
        dtype=np.float64,
    )


def lags_ms(received: Times, rate: float) -> Sample:
    """Return the delay of each arrival against equal gaps; the earliest relative arrival has delay 0."""
    ahead_ns = np.sort(received) - np.arange(len(received)) * 1e9 / rate
    return (ahead_ns - ahead_ns.min()) / 1e6 if len(ahead_ns) else ahead_ns


def quantile(sample: Sample, level: float) -> float | None:
    """Return a quantile of a sample; null: empty."""
    return float(np.quantile(sample, level)) if len(sample) else None
