"""Shared memory about upstreams: each worker's requests in flight, and keys of what was sent to each.

Each worker writes its own row of counts, and all workers write the rest, without a lock: a cell is written in one
piece. The memory outlives a worker, so its successor knows at once where sessions and prefixes are.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from engines.routing.router import ADAPTER_SLOTS
from tap.ipc.exchange import BoardSize
from tap.ipc.workercounts import clear_cells, map_cells

REQUESTS: Final = 0
"""Requests sent to the upstream that have not ended."""
PREFILL_TOKENS: Final = 1
"""Their prompt tokens that the tables did not say were cached, until the response's body begins."""
HELD_TOKENS: Final = 2
"""All their prompt tokens."""
CELLS: Final = 3
SESSION_CELLS: Final = 1 << 13
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

    def add(self, keys: Sequence[int]) -> None:
        cells, mask = self._cells, self._mask
        for key in keys:
            cells[key & mask] = key

    def remove(self, keys: Iterable[int]) -> None:
        cells, mask = self._cells, self._mask
        for key in keys:
            if cells[key & mask] == key:
                cells[key & mask] = 0

    def clear(self) -> None:
        """Forget all keys: the upstream has another, empty cache."""
        clear_cells(self._cells)


class AdapterKeys:
    """Keys of the LoRA adapters that an upstream was sent last, the latest first, and 0 in cells without one.

    Two workers that write at once may lose a key or keep it twice: the next use puts that right.
    """

    __slots__ = ("_cells",)

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells

    def __contains__(self, key: int) -> bool:
        return key in self._cells.tolist()

    def use(self, key: int) -> None:
        """Put a key first; the one unused for longest goes where there is no cell for it."""
        cells = self._cells
        if cells[0] != key:
            others = [one for one in cells.tolist() if one != key]
            for place, one in enumerate([key, *others][: len(cells)]):
                cells[place] = one

    def clear(self) -> None:
        clear_cells(self._cells)


class UpstreamBoard:
    """Counts and tables by an upstream's slot, in a file of the supervisor that each worker maps."""

    def __init__(self, path: Path | None = None, size: BoardSize = DEFAULT_SIZE) -> None:
        """Map the file at ``path``; make it if it is missing. Without ``path``: memory of this process alone."""
        counts = size.workers * size.slots * CELLS
        self._states = counts + size.slots * size.keys
        self._sessions = SESSION_CELLS if size.slots > 1 else 1  # one upstream is no choice
        self._state_width = ADAPTER_SLOTS + self._sessions
        self._cells = map_cells(path, self._states + size.slots * self._state_width)
        self._size, self._width, self._tables = size, size.slots * CELLS, counts

    def row(self, worker: int) -> memoryview:
        """Return a worker's counts, ``CELLS`` for each slot."""
        return self._cells[worker * self._width : (worker + 1) * self._width]

    def totals(self, slot: int) -> list[int]:
        """Return the counts of an upstream, of all workers."""
        cells, at = self._cells, slot * CELLS
        if self._size.workers == 1:
            return cells[at : at + CELLS].tolist()
        rows = [cells[start : start + CELLS].tolist() for start in range(at, self._tables, self._width)]
        return [sum(counts) for counts in zip(*rows, strict=True)]

    def table(self, slot: int) -> PrefixTable:
        start = self._tables + slot * self._size.keys
        return PrefixTable(self._cells[start : start + self._size.keys])

    def sessions(self, slot: int) -> PrefixTable:
        """Return the keys of sessions whose latest request went to an upstream: no prefix takes their cells."""
        start = self._states + slot * self._state_width + ADAPTER_SLOTS
        return PrefixTable(self._cells[start : start + self._sessions])

    def adapters(self, slot: int, count: int = ADAPTER_SLOTS) -> AdapterKeys:
        """Return the keys of the ``count`` adapters that an upstream was sent last, ``ADAPTER_SLOTS`` at most."""
        start = self._states + slot * self._state_width
        return AdapterKeys(self._cells[start : start + min(count, ADAPTER_SLOTS)])

    def forget_worker(self, worker: int) -> None:
        """Set a dead worker's counts to zero: its requests are cut."""
        clear_cells(self.row(worker))
