"""Token ids of recent texts by digest, within a bound; the least recently used go first."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

ENTRY_IDS = 50
"""Memory of an entry beside its ids, in ids of four bytes."""


class RecentIds:
    """Least-recently-used map that counts ids, not entries."""

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self._held = 0
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        """Least recently used first."""

    def get(self, digest: bytes) -> Sequence[int] | None:
        ids = self._entries.get(digest)
        if ids is not None:
            self._entries.move_to_end(digest)
        return ids

    def put(self, digest: bytes, ids: Sequence[int]) -> Sequence[int]:
        packed = self._entries[digest] = array("I", ids)
        self._held += len(packed) + ENTRY_IDS
        while self._held > self._max_ids:
            self._held -= len(self._entries.popitem(last=False)[1]) + ENTRY_IDS
        return packed

    def check_integrity(self) -> None:
        assert self._held == sum(len(ids) + ENTRY_IDS for ids in self._entries.values())
        assert self._held <= self._max_ids
