"""Passive health check: ejects an upstream after failures, and readmits it by one trial request at a time."""

from dataclasses import dataclass

FAILURES_IN_ROW = 5
"""Consecutive responses 500, 502, 503 or 504 that eject an upstream."""
FIRST_WAIT_S = 1.0
"""Duration of the first ejection; doubled at each further failure."""
MAX_WAIT_S = 30.0
TRIAL_S = 10.0
"""Time after which a further trial request may be sent while a trial has no result."""


@dataclass(slots=True)
class Ejection:
    """Health of an upstream as seen by one worker. Times are on the monotonic clock."""

    until_s: float = 0.0
    """End of the ejection or of the trial. 0: not ejected."""
    unreached: bool = False
    """True after a failed connection, until a connection succeeds."""
    count: int = 0
    """Number of ejections."""
    _in_row: int = 0
    """Consecutive failures."""
    _next_wait_s: float = FIRST_WAIT_S
    _trying: bool = False
    """True: a trial request was sent since the last ejection."""

    @property
    def troubled(self) -> bool:
        """True if a success would change the state: the upstream is ejected or has consecutive failures."""
        return self._in_row > 0 or self.until_s > 0.0

    def admits(self, now_s: float) -> bool:
        return self.until_s <= now_s

    def begin(self, now_s: float) -> None:
        """Record a request that is sent; to an ejected upstream, the request is a trial."""
        if self.until_s:
            self.until_s, self._trying = now_s + TRIAL_S, True

    def succeed(self) -> bool:
        back, self._in_row = self.until_s > 0.0 or self.unreached, 0
        if back:
            self.until_s, self.unreached, self._trying, self._next_wait_s = 0.0, False, False, FIRST_WAIT_S
        return back

    def miss(self) -> bool:
        """Record a failed connection to the only upstream; return True for the first of consecutive failures."""
        missed, self.unreached = not self.unreached, True
        return missed

    def fail(self, now_s: float, *, unreached: bool = False) -> bool:
        """Record a failure; return True if the failure ejects. Of concurrent failures, the first counts."""
        self._in_row += 1
        if (self.until_s and not self._trying) or not (unreached or self._trying or self._in_row >= FAILURES_IN_ROW):
            return False
        self._trying, self.unreached = False, unreached
        self.until_s = now_s + self._next_wait_s
        self._next_wait_s = min(2 * self._next_wait_s, MAX_WAIT_S)
        self.count += 1
        return True

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self.until_s - now_s)
