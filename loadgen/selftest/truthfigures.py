"""What a server's truth and a client's word make together: rates, TTFT errors, lag."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from loadgen.selftest.truth import Served

STEADY = (0.2, 0.95)
"""The part of a run, from the first request to the last, that rates are taken over: it has begun, nobody has left."""

Times = npt.NDArray[np.int64]
Sample = npt.NDArray[np.float64]


def received_ns(served: Sequence[Served]) -> Times:
    """When the requests came, in ns of the server's clock."""
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
    """How many came from ``start_ns`` on and before ``end_ns``."""
    return int(np.count_nonzero((received >= start_ns) & (received < end_ns)))


def ttft_errors_ms(served: Sequence[Served], told_ns: Mapping[str, float]) -> Sample:
    """What the client told over what the server knows, for each request of which both say something."""
    return np.array(
        [
            (told_ns[one.request_id] - one.ttft_ns) / 1e6
            for one in served
            if one.request_id in told_ns and one.ttft_ns is not None
        ],
        dtype=np.float64,
    )


def lags_ms(received: Times, rate: float) -> Sample:
    """How late each arrival was against equal gaps; the earliest of all against its place is on time."""
    ahead_ns = np.sort(received) - np.arange(len(received)) * 1e9 / rate
    return (ahead_ns - ahead_ns.min()) / 1e6 if len(ahead_ns) else ahead_ns


def quantile(sample: Sample, level: float) -> float | None:
    """Of a sample; null: it is empty."""
    return float(np.quantile(sample, level)) if len(sample) else None
