"""Upper bound of prefix hits over all eviction policies: Belady's, one request at a time."""

from heapq import heappop, heappush

import numpy as np

from measure.cache.interning import leading
from sim.vllm.kvcache import UNLIMITED
from sim.workload.prompts import Prompts
from tracefile.records.arrays import IntArray


class BeladyPool:
    """Block pool that evicts the block whose next lookup is last, or never comes: no pool has more prefix hits.

    ``usable_blocks`` None: unlimited. Each request of ``prompts`` fits the pool alone.
    """

    def __init__(self, prompts: Prompts, usable_blocks: int | None) -> None:
        self.evicted_blocks = 0
        self._prompts = prompts
        self._uses = next_uses(prompts).tolist()
        self._keys: list[int] = prompts.keys.tolist()
        self._capacity_blocks = UNLIMITED if usable_blocks is None else usable_blocks
        self._cached: dict[int, int] = {}
        """Number of the last release by block key, 0 while held; private blocks have negative keys."""
        self._eviction_heap: list[tuple[int, int, int]] = []
        """Heap of idle blocks: worth of the next lookup, number of the release, key; may hold outdated entries."""
        self._released = 0

    def run(self) -> IntArray:
        """Run the requests; return the prefix hit of each, in blocks."""
        prompts = self._prompts
        starts, hashed = prompts.starts[:-1], prompts.hashed_blocks
        columns = (starts, hashed, prompts.most_hits, prompts.full_blocks, prompts.num_blocks)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return np.array([self._serve(*row) for row in rows], np.int64)

    def _serve(self, first: int, hashed_blocks: int, most_hits: int, full: int, blocks: int) -> int:
        keys, uses = self._keys[first : first + hashed_blocks], self._uses[first : first + hashed_blocks]
        hits = next((depth for depth in range(most_hits) if keys[depth] not in self._cached), most_hits)
        self._cached.update(dict.fromkeys(keys[:hits], 0))
        while self._capacity_blocks - len(self._cached) < blocks - hits:
            _, number, key = heappop(self._eviction_heap)
            if self._cached.get(key) == number:
                del self._cached[key]
                self.evicted_blocks += 1
        private = range(-self._released - full, -self._released - hashed_blocks)
        for key, worth in zip((*private, *keys[::-1]), (*[0] * len(private), *uses[::-1]), strict=True):
            self._released += 1  # the leaf before the root
            self._cached[key] = self._released
            heappush(self._eviction_heap, (worth, self._released, key))
        return hits


def next_uses(prompts: Prompts) -> IntArray:
    """Return the worth of each block key's next lookup by a later request: higher if sooner.

    0: no further lookup, or the block is computed again before, which caches it anyway.
    """
    last, keys = len(prompts), prompts.keys
    request_of = np.repeat(np.arange(last), prompts.hashed_blocks)
    numbers = np.unique(keys, return_inverse=True)[1]
    looked_up = leading(prompts.starts, prompts.most_hits)
    order = np.argsort(numbers, kind="stable")
    same = np.append(numbers[order[1:]] == numbers[order[:-1]], False)[: len(order)]
    following = np.roll(order, -1)  # of the same key in the next request that has it
    uses = np.zeros(len(keys), np.int64)
    uses[order] = np.where(same & looked_up[following], last - request_of[following], 0)
    return uses
