"""The last minutes, second by second: growth of totals that restart with their process, and levels; sliding windows."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, Generic, TypeVar

BUCKET_S: Final = 60.0
WINDOW_MINUTES: Final = 15
"""Length of the window on the page."""

T = TypeVar("T")


class Window(Generic[T]):
    """Buckets of the last ``minutes`` minutes by a monotonic clock, made on demand."""

    def __init__(self, new_bucket: Callable[[], T], minutes: int = WINDOW_MINUTES) -> None:
        self._new_bucket = new_bucket
        self._minutes = minutes
        self._buckets: deque[tuple[int, T]] = deque()

    def bucket(self, now_s: float) -> T:
        minute = int(now_s // BUCKET_S)
        if not self._buckets or self._buckets[-1][0] < minute:
            self._forget(minute)
            self._buckets.append((minute, self._new_bucket()))
        return self._buckets[-1][1]

    def buckets(self, now_s: float) -> list[T]:
        self._forget(int(now_s // BUCKET_S))
        return [bucket for _, bucket in self._buckets]

    def _forget(self, minute: int) -> None:
        while self._buckets and self._buckets[0][0] <= minute - self._minutes:
            self._buckets.popleft()


KEPT_SAMPLES: Final = 300
RATE_SAMPLES: Final = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """Numbers of about one second."""

    span_s: float
    """Seconds since the previous sample."""
    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    dropped: float = 0.0
    in_flight: int = 0
    queue_bytes: int = 0


class Growth:
    """Growth of a total over several processes; a total that restarts takes nothing back."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}

    def since_last(self, totals: Mapping[int, float]) -> float:
        """Return the growth since the last call; a new process's first total counts as no growth."""
        grown = 0.0
        for process, total in totals.items():
            last = self._last.get(process, total)
            grown += total - last if total >= last else total
            self._last[process] = total
        return grown


class Timeline:
    """Samples of the last minutes."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def line(self, value: Callable[[Sample], float]) -> list[float]:
        return [round(value(sample), 3) for sample in self._samples]

    def rate(self, value: Callable[[Sample], float]) -> float:
        last = list(islice(reversed(self._samples), RATE_SAMPLES))
        span_s = sum(sample.span_s for sample in last)
        return sum(map(value, last)) / span_s if span_s else 0.0
