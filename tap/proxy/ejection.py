"""Passive check of an upstream by its traffic: out after failures, back by one trial request at a time."""

from tap.ipc.upstreamboard import EJECTION_CELLS
from tap.ipc.workercounts import clear_cells

FIRST_WAIT_S = 1.0
"""Time for which an upstream that failed gets no request; doubled at each further failure."""
MAX_WAIT_S = 30.0
STEADY_S = 60.0
"""After this time without an ejection, the next one is the first again: an upstream that flaps stays out longer."""
QUIET_S = 10.0
"""Time after an upstream's return in which an upstream alone is not reported away again."""
TRIAL_S = 10.0
"""Time after which another request may try an upstream whose trial has no result yet."""
UNTIL, WAIT, BACK, IN_ROW, UNREACHED = range(EJECTION_CELLS)
"""Cells: end of the wait or of the time for a trial, length of the next wait, end of the last ejection, in µs; failures
in a row; 1 if no connection was made. 0: none."""
US = 1e6


class Ejection:
    """State of one upstream's passive check, shared by all workers. Times are of a monotonic clock.

    Failures of all workers count in one row, and one worker's trial is all workers': clients see as many failures with
    many workers as with one. Workers that write at once may lose a count.
    """

    __slots__ = ("_cells", "_limit", "_trial", "count")

    def __init__(self, limit: int, cells: memoryview | None = None) -> None:
        """``limit``: responses 5xx in a row that eject. 0: none does, only connections that fail.

        ``cells``: of ``UpstreamBoard.ejection``; null: of this worker alone.
        """
        self._limit = limit
        self._cells = memoryview(bytearray(8 * EJECTION_CELLS)).cast("Q") if cells is None else cells
        self._trial = 0
        """``UNTIL`` of this worker's latest trial."""
        self.count = 0
        """Ejections by this worker."""

    @property
    def until_s(self) -> float:
        """End of the wait, or of the time for a trial. 0: not ejected."""
        return self._cells[UNTIL] / US

    @property
    def unreached(self) -> bool:
        """Ejected, or alone and away, because no connection was made; one that is made ends it."""
        return self._cells[UNREACHED] > 0

    @property
    def troubled(self) -> bool:
        """True if a success would change the state."""
        return self._cells[IN_ROW] > 0 or self._cells[UNTIL] > 0

    def admits(self, now_s: float) -> bool:
        return self.until_s <= now_s

    def begin(self, now_s: float) -> None:
        """Note that a request is sent: to an ejected upstream it is a trial."""
        if self._cells[UNTIL]:
            self._trial = self._cells[UNTIL] = int((now_s + TRIAL_S) * US)

    def succeed(self, now_s: float) -> bool:
        """Take a success; return True if it ends an ejection."""
        cells = self._cells
        back, cells[IN_ROW] = cells[UNTIL] > 0 or cells[UNREACHED] > 0, 0
        if back:
            cells[UNTIL], cells[UNREACHED], cells[BACK] = 0, 0, int(now_s * US)
        return back

    def miss(self, now_s: float) -> bool:
        """Note that no connection was made to an upstream that is alone; return True if it is away since now."""
        cells = self._cells
        if cells[UNREACHED] or (cells[BACK] and now_s - cells[BACK] / US < QUIET_S):
            return False
        cells[UNREACHED] = 1
        return True

    def fail(self, now_s: float, *, unreached: bool = False) -> bool:
        """Take a failure; return True if it ejects. Of many failures at once the first counts."""
        cells = self._cells
        cells[IN_ROW] += 1
        trying = 0 < cells[UNTIL] == self._trial
        if cells[UNTIL] and not trying:
            return False
        if not (unreached or trying or (self._limit and cells[IN_ROW] >= self._limit)):
            return False
        is_first = not cells[WAIT] or (not trying and now_s - cells[BACK] / US > STEADY_S)
        wait_s = FIRST_WAIT_S if is_first else cells[WAIT] / US
        self._trial, cells[UNREACHED] = 0, int(unreached)
        cells[UNTIL], cells[WAIT] = int((now_s + wait_s) * US), int(min(2 * wait_s, MAX_WAIT_S) * US)
        self.count += 1
        return True

    def clear(self) -> None:
        clear_cells(self._cells)

    def wait_s(self, now_s: float) -> float:
        """Return the rest of the wait."""
        return max(0.0, self.until_s - now_s)
