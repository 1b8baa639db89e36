"""Shared memory of the workers: request counts, upstream load and prefix tables, in 64-bit cells of mapped files.

Writes of a cell are atomic, so there is no lock. Each worker writes its rows of counts; all workers write the prefix
tables. The files outlive a worker: after a crash, the supervisor has its counts, and its successor the prefix tables.
"""

import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tracefile.records.errors import InputError

RECORDER_SOCKET: Final = "recorder.sock"
"""Unix socket of the recorder, in the same folder."""
COUNTS_FILE: Final = "counts"
BOARD_FILE: Final = "upstreams"

OFFERED: Final = 0
"""Started requests to record."""
SENT: Final = 1
"""Exchanges written completely to the recorder's socket."""
QUEUE_FULL: Final = 2
"""Exchanges dropped because captures exceeded the memory budget."""
RECORDER_OFF: Final = 3
"""Exchanges dropped without a recorder."""
IN_FLIGHT: Final = 4
"""Requests to record that are in flight."""
NOT_INJECTED: Final = 5
"""Requests without ``--inject``, and responses that kept the injected fields."""
UNRECORDED: Final = 6
"""POSTs to paths that are only relayed: no known generation API."""
COUNT_CELLS: Final = 8
CELL_BYTES: Final = 8

DROP_CELLS: Final = {"queue_full": QUEUE_FULL, "recorder_off": RECORDER_OFF}
"""Cell by reason for a dropped exchange."""


def map_cells(path: Path | None, count: int) -> memoryview:
    """Map the file at ``path`` as 64-bit cells; create a missing file. None: private memory."""
    length = count * CELL_BYTES
    if path is None:
        return memoryview(mmap.mmap(-1, length)).cast("Q")
    with open(path, "ab+", buffering=0) as file:
        # Written, not extended by truncate: on a full disk, touching an unallocated page would kill the process.
        file.write(bytes(length - os.fstat(file.fileno()).st_size))
        if os.fstat(file.fileno()).st_size < length:
            raise InputError(f"{path}: no space for {length} bytes of shared counts; expected free disk space")
        return memoryview(mmap.mmap(file.fileno(), length)).cast("Q")


def clear_cells(cells: memoryview) -> None:
    cells[:] = memoryview(bytes(len(cells) * CELL_BYTES)).cast("Q")


class WorkerCounts:
    """Request counts, one row per worker."""

    def __init__(self, folder: str, workers: int) -> None:
        self._cells = map_cells(Path(folder) / COUNTS_FILE, workers * COUNT_CELLS)
        self._in_flight = range(IN_FLIGHT, workers * COUNT_CELLS, COUNT_CELLS)

    def row(self, worker: int) -> memoryview:
        return self._cells[worker * COUNT_CELLS : (worker + 1) * COUNT_CELLS]

    def in_flight(self) -> int:
        cells = self._cells
        if len(self._in_flight) == 1:
            return cells[IN_FLIGHT]
        return sum([cells[at] for at in self._in_flight])

    def pop_row(self, worker: int) -> list[int]:
        """Return and reset the row of a crashed worker."""
        row = self.row(worker)
        counts = list(row)
        clear_cells(row)
        return counts


REQUESTS: Final = 0
"""Requests in flight to the upstream."""
PREFILL_TOKENS: Final = 1
"""Outstanding prefill: uncached prompt tokens of requests without a first token."""
IN_FLIGHT_TOKENS: Final = 2
"""Prompt tokens of the requests in flight, cached tokens included."""
LOAD_CELLS: Final = 3
SESSION_CELLS: Final = 1 << 13


class BoardSize(msgspec.Struct, array_like=True, frozen=True):
    """Size of the shared load cells and prefix tables of the upstreams."""

    workers: int = 1
    slots: int = 16
    keys: int = 1 << 10
    """Cells of an upstream's prefix table, a power of two."""


DEFAULT_SIZE: Final = BoardSize()


class PrefixTable:
    """Direct-mapped table of the prefix block keys (or session keys) that were sent to an upstream.

    A new key replaces the key in its cell: after N additions to a table of N cells, 63 % of the earlier keys are
    evicted. Each request writes its keys again, so unused keys are evicted first, as in a prefix cache of this size.
    """

    __slots__ = ("_cells", "_mask")

    def __init__(self, cells: memoryview) -> None:
        """``cells``: 64-bit cells; their number is a power of two."""
        self._cells, self._mask = cells, len(cells) - 1

    def overlap(self, keys: Sequence[int]) -> int:
        """Return the prefix hit: the number of leading keys up to the last key in the table.

        Keys are chained, so a hit implies all keys before it, even if the cell of an earlier key was replaced.
        """
        cells, mask = self._cells, self._mask
        for count in range(len(keys), 0, -1):
            key = keys[count - 1]
            if cells[key & mask] == key:
                return count
        return 0

    def add(self, keys: Iterable[int]) -> None:
        cells, mask = self._cells, self._mask
        for key in keys:
            cells[key & mask] = key

    def remove(self, key: int) -> None:
        if self._cells[key & self._mask] == key:
            self._cells[key & self._mask] = 0

    def clear(self) -> None:
        """Clear all keys: the upstream's prefix cache is empty."""
        clear_cells(self._cells)


class UpstreamBoard:
    """Load cells, prefix table and session table of each upstream, by slot."""

    def __init__(self, folder: str | None = None, size: BoardSize = DEFAULT_SIZE) -> None:
        """``folder``: of the mapped file; None: private memory."""
        self._size, self._width = size, size.slots * LOAD_CELLS
        self._tables = size.workers * self._width
        self._sessions = self._tables + size.slots * size.keys
        self._session_cells = SESSION_CELLS if size.slots > 1 else 1  # a single upstream needs no routing
        count = self._sessions + size.slots * self._session_cells
        self._cells = map_cells(None if folder is None else Path(folder) / BOARD_FILE, count)

    def row(self, worker: int) -> memoryview:
        """Return the load cells of a worker, ``LOAD_CELLS`` per slot."""
        return self._cells[worker * self._width : (worker + 1) * self._width]

    def totals(self, slot: int) -> list[int]:
        """Return the load of an upstream, summed over workers."""
        cells, at = self._cells, slot * LOAD_CELLS
        if self._size.workers == 1:
            return cells[at : at + LOAD_CELLS].tolist()
        rows = [cells[start : start + LOAD_CELLS].tolist() for start in range(at, self._tables, self._width)]
        return [sum(counts) for counts in zip(*rows, strict=True)]

    def prefix_table(self, slot: int) -> PrefixTable:
        start = self._tables + slot * self._size.keys
        return PrefixTable(self._cells[start : start + self._size.keys])

    def sessions(self, slot: int) -> PrefixTable:
        """Return the table of sessions whose latest request went to the upstream, separate from the prefix table."""
        start = self._sessions + slot * self._session_cells
        return PrefixTable(self._cells[start : start + self._session_cells])

    def forget_worker(self, worker: int) -> None:
        """Reset the load cells of a crashed worker: its requests are aborted."""
        clear_cells(self.row(worker))
