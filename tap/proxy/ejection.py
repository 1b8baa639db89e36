"""Passive check of an upstream by its traffic: out after failures, back by one trial request at a time."""

FIRST_WAIT_S = 1.0
"""Time for which an upstream that failed gets no request; doubled at each further failure."""
MAX_WAIT_S = 30.0
STEADY_S = 60.0
"""After this time without an ejection, the next one is the first again: an upstream that flaps stays out longer."""
TRIAL_S = 10.0
"""Time after which another request may try an upstream whose trial has no result yet."""


class Ejection:
    """State of one upstream's passive check, as one worker sees it. Times are of a monotonic clock."""

    __slots__ = ("_back_s", "_limit", "_trying", "_wait_s", "count", "in_row", "unreached", "until_s")

    def __init__(self, limit: int) -> None:
        """``limit``: responses 5xx in a row that eject. 0: none does, only connections that fail."""
        self._limit = limit
        self._wait_s = FIRST_WAIT_S
        self._back_s = float("-inf")
        self._trying = False
        self.unreached = False
        """Ejected because no connection was made; one that is made ends it."""
        self.until_s = 0.0
        """End of the wait, or of the time for a trial. 0: not ejected."""
        self.in_row = 0
        """Failed requests since the last success."""
        self.count = 0

    @property
    def troubled(self) -> bool:
        """True if a success would change the state."""
        return self.in_row > 0 or self.until_s > 0.0

    def admits(self, now_s: float) -> bool:
        return self.until_s <= now_s

    def begin(self, now_s: float) -> None:
        """Note that a request is sent: to an ejected upstream it is a trial."""
        if self.until_s > 0.0:
            self._trying, self.until_s = True, now_s + TRIAL_S

    def succeed(self, now_s: float) -> bool:
        """Take a success; return True if it ends an ejection."""
        back, self.in_row = self.until_s > 0.0, 0
        if back:
            self._trying = self.unreached = False
            self.until_s, self._back_s = 0.0, now_s
        return back

    def fail(self, now_s: float, *, unreached: bool = False) -> bool:
        """Take a failure; return True if it ejects. Of many failures at once the first counts."""
        self.in_row += 1
        if self.until_s > 0.0 and not self._trying:
            return False
        if not (unreached or self._trying or (self._limit and self.in_row >= self._limit)):
            return False
        if not self._trying and now_s - self._back_s > STEADY_S:
            self._wait_s = FIRST_WAIT_S
        self.until_s, self._trying, self.unreached = now_s + self._wait_s, False, unreached
        self._wait_s = min(2 * self._wait_s, MAX_WAIT_S)
        self.count += 1
        return True

    def wait_s(self, now_s: float) -> float:
        """Return the rest of the wait."""
        return max(0.0, self.until_s - now_s)
