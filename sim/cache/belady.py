"""The bound of every eviction: a pool that knows the future, one request at a time."""

from heapq import heappop, heappush

import numpy as np

from measure.cache.interning import leading
from sim.vllm.kvcache import UNLIMITED
from sim.workload.prompts import Prompts
from tracefile.records.arrays import IntArray


class BeladyPool:
    """A pool of so many blocks (None: unlimited) that evicts what is looked up last, or never: no pool hits more.

    Each request of ``prompts`` fits it alone.
    """

    def __init__(self, prompts: Prompts, usable_blocks: int | None) -> None:
        self.evicted_blocks = 0
        self._prompts = prompts
        self._uses = next_uses(prompts).tolist()
        self._keys: list[int] = prompts.keys.tolist()
        self._room = UNLIMITED if usable_blocks is None else usable_blocks
        self._cached: dict[int, int] = {}
        """By key, negative of a block that no other request has: its number by release, 0 while it is held."""
        self._line: list[tuple[int, int, int]] = []
        """A heap of idle blocks: worth of the next use, number by release, key. Some are outdated."""
        self._released = 0

    def run(self) -> IntArray:
        """Run the requests; return the hit blocks of each."""
        prompts = self._prompts
        columns = (prompts.starts[:-1], prompts.known, prompts.most_hits, prompts.full_blocks, prompts.num_blocks)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return np.array([self._serve(*row) for row in rows], np.int64)

    def _serve(self, first: int, known: int, most_hits: int, full: int, blocks: int) -> int:
        keys, uses = self._keys[first : first + known], self._uses[first : first + known]
        hits = next((depth for depth in range(most_hits) if keys[depth] not in self._cached), most_hits)
        self._cached.update(dict.fromkeys(keys[:hits], 0))
        while self._room - len(self._cached) < blocks - hits:
            _, number, key = heappop(self._line)
            if self._cached.get(key) == number:
                del self._cached[key]
                self.evicted_blocks += 1
        private = range(-self._released - full, -self._released - known)
        for key, worth in zip((*private, *keys[::-1]), (*[0] * len(private), *uses[::-1]), strict=True):
            self._released += 1  # the leaf before the root
            self._cached[key] = self._released
            heappush(self._line, (worth, self._released, key))
        return hits


def next_uses(prompts: Prompts) -> IntArray:
    """Worth of each key's next lookup by a later request: the sooner it comes, the more.

    0: no lookup comes, or the key is computed again before, which caches it anyway.
    """
    last, keys = len(prompts), prompts.keys
    request_of = np.repeat(np.arange(last), prompts.known)
    numbers = np.unique(keys, return_inverse=True)[1]
    looked_up = leading(prompts.starts, prompts.most_hits)
    order = np.argsort(numbers, kind="stable")
    same = np.append(numbers[order[1:]] == numbers[order[:-1]], False)[: len(order)]
    following = np.roll(order, -1)  # of the same key in the next request that has it
    uses = np.zeros(len(keys), np.int64)
    uses[order] = np.where(same & looked_up[following], last - request_of[following], 0)
    return uses
