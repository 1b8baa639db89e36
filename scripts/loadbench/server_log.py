"""Pace of the reference server, and its log of each request: the ground truth for a client.

All times are of the monotonic clock that every process of a machine shares (``time.perf_counter_ns``). The server
notes the last byte of a request and the write of the first token, so a client's TTFT error is never negative: it is
the way there and back through the kernel, and the client's delay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.core.draws import below, text_key
from measure.quantiles import quantile as order_statistic

NS_PER_MS = 1_000_000
STEADY = (0.2, 0.95)
"""Part of a run for rates: all clients have started and none has ended."""

Times = npt.NDArray[np.int64]
Sample = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times and pieces of the server's responses."""

    ttft_low_ms: float = 0.0
    ttft_high_ms: float = 0.0
    """From a request's last byte to the first write, drawn by request id."""
    gap_ms: float = 0.0
    """Between two writes; 0: all at once."""
    tokens_per_write: int = 1
    """Events of later writes; the first write has one."""
    prompt_tokens: int = 256
    """Usage's prompt tokens: the server does not read prompts."""

    def ttft_ns(self, request_id: str) -> int:
        low_ns, high_ns = (round(bound * NS_PER_MS) for bound in (self.ttft_low_ms, self.ttft_high_ms))
        return low_ns + below(text_key(request_id), high_ns - low_ns + 1)


class Served(msgspec.Struct, frozen=True, array_like=True):
    """Request as the server saw it, in ns of the monotonic clock; null: it did not come to that."""

    request_id: str
    """Its ``X-Request-Id``, else its number, ``#7``."""
    received_ns: int
    """Start of the read with its last byte."""
    due_ns: int
    first_write_ns: int | None
    """Just before the first token's bytes went to the kernel."""
    last_write_ns: int | None
    """Just before the stream's end, likewise."""
    tokens: int
    writes: int
    """Pieces of the whole stream."""

    @property
    def ttft_ns(self) -> int | None:
        return None if self.first_write_ns is None else self.first_write_ns - self.received_ns

    @property
    def lateness_ns(self) -> int | None:
        """Delay of the server's own write."""
        return None if self.first_write_ns is None else self.first_write_ns - self.due_ns


class ServerLog(msgspec.Struct, frozen=True):
    """Log of the server after a run."""

    served: list[Served]
    cpu_ns: int
    started_ns: int
    read_ns: int


def received_ns(served: Sequence[Served]) -> Times:
    return np.array([one.received_ns for one in served], dtype=np.int64)


def steady_part(received: Times) -> tuple[int, int]:
    """Start and end of the steady part; both 0 if there is none."""
    if not len(received):
        return 0, 0
    first, last = int(received.min()), int(received.max())
    start, end = (round(first + share * (last - first)) for share in STEADY)
    return start, end


def count_between(received: Times, start_ns: int, end_ns: int) -> int:
    return int(np.count_nonzero((received >= start_ns) & (received < end_ns)))


def ttft_errors_ms(served: Sequence[Served], told_ns: Mapping[str, float]) -> Sample:
    """Client TTFT − server TTFT of each request that both know."""
    return np.array(
        [
            (told_ns[one.request_id] - one.ttft_ns) / 1e6
            for one in served
            if one.request_id in told_ns and one.ttft_ns is not None
        ],
        dtype=np.float64,
    )


def quantile(sample: Sample, level: float) -> float | None:
    return order_statistic(np.sort(sample), level) if len(sample) else None
