"""Workers' counts in memory that outlives them: after a kill the supervisor still knows what was offered and sent.

A row of unsigned 64-bit cells a worker, each written by that worker alone. Nothing is locked: a cell is written in
one piece, and whoever reads several while traffic flows gets numbers that are a moment apart.
"""

import mmap
import os
from pathlib import Path
from typing import Final

OFFERED: Final = 0
"""Requests begun that are to be recorded."""
SENT: Final = 1
"""Exchanges that the recorder's socket has taken whole."""
QUEUE_FULL: Final = 2
"""Exchanges given up because the copies in flight and in the outbox were at their bound."""
RECORDER_OFF: Final = 3
"""Exchanges given up because there was no recorder to take them."""
IN_FLIGHT: Final = 4
"""Requests of OFFERED that have not ended."""
NOT_INJECTED: Final = 5
"""Requests that ``--inject`` let pass as they came, and responses that passed with what was added to them."""
CELLS: Final = 8
CELL_BYTES: Final = 8

DROP_CELLS: Final = {"queue_full": QUEUE_FULL, "recorder_off": RECORDER_OFF}
"""Where a worker counts what it drops, by reason."""


class WorkerCounts:
    """All workers' rows; the file is the supervisor's, and every worker maps it."""

    def __init__(self, path: Path, workers: int) -> None:
        """Map the file at ``path``, which is made if it is not there, with a row for each worker."""
        size = workers * CELLS * CELL_BYTES
        with open(path, "ab+", buffering=0) as file:
            # Written, not just made long: on a disk that is full later, a page that has no place kills who touches it.
            file.write(bytes(size - os.fstat(file.fileno()).st_size))
            self._map = mmap.mmap(file.fileno(), size)
        self._cells = memoryview(self._map).cast("Q")
        self._in_flight = range(IN_FLIGHT, workers * CELLS, CELLS)

    def row(self, worker: int) -> memoryview:
        """The cells of one worker, numbered from 0."""
        return self._cells[worker * CELLS : (worker + 1) * CELLS]

    def in_flight(self) -> int:
        """Requests in flight at all workers that are to be recorded."""
        cells = self._cells
        if len(self._in_flight) == 1:
            return cells[IN_FLIGHT]
        return sum([cells[at] for at in self._in_flight])

    def take(self, worker: int) -> list[int]:
        """A dead worker's row, which is zero after it for the worker that follows."""
        row = self.row(worker)
        taken = list(row)
        row[:] = memoryview(bytes(CELLS * CELL_BYTES)).cast("Q")
        return taken
