"""Passive check of an upstream by its traffic: out after failures, back by one trial request at a time."""

FAILURES_IN_ROW = 5
"""Responses 500, 502, 503 or 504 in a row after which an upstream gets no requests for a while."""
FIRST_WAIT_S = 1.0
"""Time for which an upstream that failed gets no request; doubled at each further failure."""
MAX_WAIT_S = 30.0
STEADY_S = 60.0
"""After this time without an ejection, the next one is the first again: an upstream that flaps stays out longer."""
QUIET_S = 10.0
"""Time after an upstream's return in which an upstream alone is not reported away again."""
TRIAL_S = 10.0
"""Time after which another request may try an upstream whose trial has no result yet."""


class Ejection:
    """State of one upstream's passive check, of one worker's traffic. Times are of a monotonic clock."""

    __slots__ = ("_back_s", "_in_row", "_limit", "_next_wait_s", "_trying", "count", "unreached", "until_s")

    def __init__(self, limit: int = FAILURES_IN_ROW) -> None:
        """``limit``: failing responses in a row that eject."""
        self._limit = limit
        self._in_row = 0
        """Failures without a success between them."""
        self._next_wait_s = FIRST_WAIT_S
        self._back_s = float("-inf")
        """End of the last ejection."""
        self._trying = False
        """A trial has begun since the last ejection."""
        self.until_s = 0.0
        """End of the wait, or of the time for a trial. 0: not ejected."""
        self.unreached = False
        """Ejected, or alone and away, because no connection was made; one that is made ends it."""
        self.count = 0
        """Ejections."""

    @property
    def troubled(self) -> bool:
        """True if a success would change the state."""
        return self._in_row > 0 or self.until_s > 0.0

    def admits(self, now_s: float) -> bool:
        return self.until_s <= now_s

    def begin(self, now_s: float) -> None:
        """Note that a request is sent: to an ejected upstream it is a trial."""
        if self.until_s:
            self.until_s, self._trying = now_s + TRIAL_S, True

    def succeed(self, now_s: float) -> bool:
        """Take a success; return True if it ends an ejection."""
        back, self._in_row = self.until_s > 0.0 or self.unreached, 0
        if back:
            self.until_s, self.unreached, self._trying, self._back_s = 0.0, False, False, now_s
        return back

    def miss(self, now_s: float) -> bool:
        """Note that no connection was made to an upstream that is alone; return True if it is away since now."""
        if self.unreached or now_s - self._back_s < QUIET_S:
            return False
        self.unreached = True
        return True

    def fail(self, now_s: float, *, unreached: bool = False) -> bool:
        """Take a failure; return True if it ejects. Of many failures at once the first counts."""
        self._in_row += 1
        if self.until_s and not self._trying:
            return False
        if not (unreached or self._trying or self._in_row >= self._limit):
            return False
        if not self._trying and now_s - self._back_s > STEADY_S:
            self._next_wait_s = FIRST_WAIT_S
        self._trying, self.unreached = False, unreached
        self.until_s = now_s + self._next_wait_s
        self._next_wait_s = min(2 * self._next_wait_s, MAX_WAIT_S)
        self.count += 1
        return True

    def wait_s(self, now_s: float) -> float:
        """Return the rest of the wait."""
        return max(0.0, self.until_s - now_s)
