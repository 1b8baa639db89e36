"""Sliding window of the last minutes: a bucket a minute, the oldest forgotten."""

from collections import deque
from collections.abc import Callable
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
