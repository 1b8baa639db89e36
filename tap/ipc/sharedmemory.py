"""Shared memory of the workers: 64-bit cells in files of the supervisor, which outlive a worker.

A cell is written in one piece, so there is no lock. Each worker writes its own rows of counts; tables of keys are
written by all. After a kill the supervisor still knows the requests, and the successor where sessions and prefixes are.
"""

import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tracefile.records.errors import InputError

RECORDER_SOCKET: Final = "recorder.sock"
"""Unix socket for the workers' exchanges, in the same folder."""
COUNTS_FILE: Final = "counts"
BOARD_FILE: Final = "upstreams"

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
COUNT_CELLS: Final = 8
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
    """Rows of all workers' counts."""

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

    def take(self, worker: int) -> list[int]:
        """Return a dead worker's row and set it to zero for its successor."""
        row = self.row(worker)
        taken = list(row)
        clear_cells(row)
        return taken


REQUESTS: Final = 0
"""Requests sent to the upstream that have not ended."""
PREFILL_TOKENS: Final = 1
"""Their prompt tokens that the tables did not say were cached, until the response's body begins."""
HELD_TOKENS: Final = 2
"""All their prompt tokens."""
LOAD_CELLS: Final = 3
SESSION_CELLS: Final = 1 << 13


class BoardSize(msgspec.Struct, array_like=True, frozen=True):
    """Size of the memory that workers share about upstreams."""

    workers: int = 1
    slots: int = 16
    keys: int = 1 << 10
    """Cells of an upstream's table, a power of two."""


DEFAULT_SIZE: Final = BoardSize()


class PrefixTable:
    """Keys of prefixes, or of sessions, that an upstream was sent, each in the one cell that its value names.

    A new key replaces the old one of its cell. Of the keys of a table with N cells, 63 % are lost once N more were
    added. Each request writes its keys again, so the table forgets unused keys first, like a cache of its size.
    """

    __slots__ = ("_cells", "_mask")

    def __init__(self, cells: memoryview) -> None:
        """``cells``: a power of two of 64-bit cells."""
        self._cells, self._mask = cells, len(cells) - 1

    def overlap(self, keys: Sequence[int]) -> int:
        """Return the number of leading keys up to the last one that is in the table.

        Keys are chained, so it tells of all before it: another key in the cell of one of them does not hide the rest.
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
        """Forget all keys: the upstream has another, empty cache."""
        clear_cells(self._cells)


class UpstreamBoard:
    """Loads and tables of keys by an upstream's slot."""

    def __init__(self, folder: str | None = None, size: BoardSize = DEFAULT_SIZE) -> None:
        """Without ``folder``: memory of this process alone."""
        self._size, self._width = size, size.slots * LOAD_CELLS
        self._tables = size.workers * self._width
        self._sessions = self._tables + size.slots * size.keys
        self._session_cells = SESSION_CELLS if size.slots > 1 else 1  # one upstream is no choice
        count = self._sessions + size.slots * self._session_cells
        self._cells = map_cells(None if folder is None else Path(folder) / BOARD_FILE, count)

    def row(self, worker: int) -> memoryview:
        """Return a worker's counts, ``LOAD_CELLS`` for each slot."""
        return self._cells[worker * self._width : (worker + 1) * self._width]

    def totals(self, slot: int) -> list[int]:
        """Return the counts of an upstream, of all workers."""
        cells, at = self._cells, slot * LOAD_CELLS
        if self._size.workers == 1:
            return cells[at : at + LOAD_CELLS].tolist()
        rows = [cells[start : start + LOAD_CELLS].tolist() for start in range(at, self._tables, self._width)]
        return [sum(counts) for counts in zip(*rows, strict=True)]

    def table(self, slot: int) -> PrefixTable:
        start = self._tables + slot * self._size.keys
        return PrefixTable(self._cells[start : start + self._size.keys])

    def sessions(self, slot: int) -> PrefixTable:
        """Return the keys of sessions whose latest request went to an upstream: no prefix takes their cells."""
        start = self._sessions + slot * self._session_cells
        return PrefixTable(self._cells[start : start + self._session_cells])

    def forget_worker(self, worker: int) -> None:
        """Set a dead worker's counts to zero: its requests are cut."""
        clear_cells(self.row(worker))
