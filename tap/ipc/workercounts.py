"""Counts of the workers in shared memory: after a kill the supervisor still knows the offered and sent requests.

Each worker has a row of unsigned 64-bit cells that it alone writes, without a lock: a cell is written in one piece.
"""

import mmap
import os
from pathlib import Path
from typing import Final

from tracefile.records.errors import InputError

OFFERED: Final = 0
"""Requests begun that are to be recorded."""
SENT: Final = 1
"""Exchanges taken whole by the recorder's socket."""
QUEUE_FULL: Final = 2
"""Exchanges dropped because copies in flight and in the outbox were at their bound."""
RECORDER_OFF: Final = 3
"""Exchanges dropped because there was no recorder."""
IN_FLIGHT: Final = 4
"""Requests of OFFERED that have not ended."""
NOT_INJECTED: Final = 5
"""Requests that ``--inject`` left unchanged, and responses that passed with its additions."""
UNRECORDED: Final = 6
"""POSTs that were only relayed: their path is of no generation that is known."""
CELLS: Final = 8
CELL_BYTES: Final = 8

DROP_CELLS: Final = {"queue_full": QUEUE_FULL, "recorder_off": RECORDER_OFF}
"""Cell of each reason for a dropped exchange."""


def map_cells(path: Path | None, count: int) -> memoryview:
    """Map the file at ``path`` as 64-bit cells; make it if it is missing. None: memory of this process alone."""
    length = count * CELL_BYTES
    if path is None:
        return memoryview(mmap.mmap(-1, length)).cast("Q")
    with open(path, "ab+", buffering=0) as file:
        # Written, not truncated to length: on a full disk, touching a page without space kills the process.
        file.write(bytes(length - os.fstat(file.fileno()).st_size))
        if os.fstat(file.fileno()).st_size < length:
            raise InputError(f"{path}: no space for {length} bytes of shared counts; expected room on its disk")
        return memoryview(mmap.mmap(file.fileno(), length)).cast("Q")


def clear_cells(cells: memoryview) -> None:
    cells[:] = memoryview(bytes(len(cells) * CELL_BYTES)).cast("Q")


class WorkerCounts:
    """Rows of all workers, in a file of the supervisor that each worker maps."""

    def __init__(self, path: Path, workers: int) -> None:
        """Map the file at ``path`` with a row for each worker; make it if it is missing."""
        self._cells = map_cells(path, workers * CELLS)
        self._in_flight = range(IN_FLIGHT, workers * CELLS, CELLS)

    def row(self, worker: int) -> memoryview:
        return self._cells[worker * CELLS : (worker + 1) * CELLS]

    def in_flight(self) -> int:
        cells = self._cells
        if len(self._in_flight) == 1:
            return cells[IN_FLIGHT]
        return sum([cells[at] for at in self._in_flight])

    def take(self, worker: int) -> list[int]:
        """Return a dead worker's row and set it to zero for its successor."""
        row = self.row(worker)
        taken = list(row)
        clear_cells(row)
        return taken
