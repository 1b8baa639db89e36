"""The last seconds of a run: what came in them, and how fast."""

from collections import deque

from measure.tally import Recent

WINDOW_S = 10.0


class RecentWindow:
    """Samples of the last ``WINDOW_S``, in memory that does not grow with the load."""

    def __init__(self) -> None:
        self.whole = Recent()
        self._parts: deque[tuple[float, Recent]] = deque()

    def add(self, at_s: float, recent: Recent) -> None:
        """What came just before ``at_s``."""
        recent.fold()
        self.whole.merge(recent)
        self._parts.append((at_s, recent))
        self.forget(at_s)

    def forget(self, now_s: float) -> None:
        """Drop what is too old."""
        while self._parts and self._parts[0][0] < now_s - WINDOW_S:
            self.whole.take_out(self._parts.popleft()[1])


class RateWindow:
    """How fast a count has grown in the last ``WINDOW_S``."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque([(0.0, 0)])

    def add(self, at_s: float, count: int) -> None:
        """The count at a time, later than the one before; one point from before the window stays."""
        self._points.append((at_s, count))
        while len(self._points) > 2 and self._points[1][0] <= at_s - WINDOW_S:
            self._points.popleft()

    def per_s(self) -> float:
        """Per second; 0 as long as there is no time between."""
        (from_s, before), (to_s, after) = self._points[0], self._points[-1]
        return (after - before) / (to_s - from_s) if to_s > from_s else 0.0
