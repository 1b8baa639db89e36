"""Passive check of an upstream by its traffic: out after failures, back by one trial request at a time."""

from dataclasses import dataclass

FAILURES_IN_ROW = 5
"""Responses 500, 502, 503 or 504 in a row after which an upstream gets no requests for a while."""
FIRST_WAIT_S = 1.0
"""Time for which an upstream that failed gets no request; doubled at each further failure."""
MAX_WAIT_S = 30.0
TRIAL_S = 10.0
"""Time after which another request may try an upstream whose trial has no result yet."""


@dataclass(slots=True)
class Ejection:
    """State of one upstream's passive check, of one worker's traffic. Times are of a monotonic clock."""

    until_s: float = 0.0
    """End of the wait, or of the time for a trial. 0: not ejected."""
    unreached: bool = False
    """Ejected, or alone and away, because no connection was made; one that is made ends it."""
    count: int = 0
    """Ejections."""
    _in_row: int = 0
    """Failures without a success between them."""
    _next_wait_s: float = FIRST_WAIT_S
    _trying: bool = False
    """A trial has begun since the last ejection."""

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

    def succeed(self) -> bool:
        """Take a success; return True if it ends an ejection."""
        back, self._in_row = self.until_s > 0.0 or self.unreached, 0
        if back:
            self.until_s, self.unreached, self._trying, self._next_wait_s = 0.0, False, False, FIRST_WAIT_S
        return back

    def miss(self) -> bool:
        """Note that no connection was made to an upstream that is alone; return True if it is away since now."""
        missed, self.unreached = not self.unreached, True
        return missed

    def fail(self, now_s: float, *, unreached: bool = False) -> bool:
        """Take a failure; return True if it ejects. Of many failures at once the first counts."""
        self._in_row += 1
        if (self.until_s and not self._trying) or not (unreached or self._trying or self._in_row >= FAILURES_IN_ROW):
            return False
        self._trying, self.unreached = False, unreached
        self.until_s = now_s + self._next_wait_s
        self._next_wait_s = min(2 * self._next_wait_s, MAX_WAIT_S)
        self.count += 1
        return True

    def wait_s(self, now_s: float) -> float:
        """Return the rest of the wait."""
        return max(0.0, self.until_s - now_s)
