"""The last requests of a trace, each with its hits in caches of several sizes: bounded in time and in memory."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from measure.cache.stackdepth import RecencyStack, empty_stack, take_chain, with_room
from measure.modelstate import CacheName
from sim.vllm.config import EngineConfig
from sim.vllm.rules import lookup_limit
from sim.workload.chain import Chains
from tracefile.records.arrays import IntArray
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record

MOST_REQUESTS = 2048
MOST_NUMBERS = 1 << 20
"""Gaps and hashes of all kept requests, 40 bytes each."""
MOST_BLOCKS = 1 << 19
"""Blocks whose order of use is kept, 130 bytes each; a larger cache is counted in larger blocks."""
FIRST_PLACES = 1 << 16
_WORD = (1 << 64) - 1
SIZES: dict[CacheName, float] = {"half": 0.5, "today": 1.0, "twice": 2.0}


class CacheSizes:
    """Blocks of an engine in the order of their last use; requests come in the order of their ends."""

    def __init__(self, meta: Meta, engine: EngineConfig) -> None:
        usable = engine.usable_blocks
        self.blocks = {name: max(int(usable * factor), 1) for name, factor in SIZES.items()}
        """Usable blocks of each size, the engine's blocks."""
        factor = 1
        while usable * SIZES["twice"] / factor > MOST_BLOCKS:
            factor *= 2
        self._chains = Chains(meta, engine.block_size * factor)
        self.counted_in = self._chains.block_size
        """Tokens of the blocks that hits are counted in."""
        self._sizes = np.array([max(blocks // factor, 1) for blocks in self.blocks.values()], np.int64)
        self._stack: RecencyStack = empty_stack(FIRST_PLACES)

    def take(self, record: Record) -> IntArray:
        """Return the tokens that the request would have hit in a cache of each size, and count its blocks as used."""
        keys = np.array([key & _WORD for key in self._chains.known(record)], np.uint64)
        if self._stack.state[0] + len(keys) > self._stack.state[1]:
            self._stack = with_room(self._stack, max(len(keys), FIRST_PLACES), int(self._sizes[-1]))
        limit = lookup_limit(record.prompt_tokens or 0, self._chains.block_size, int(bool(record.prompt_logprobs)))
        hits = take_chain(self._stack, keys, max(limit, 0), self._sizes)
        return np.asarray(hits * self._chains.block_size)


@dataclass(frozen=True, slots=True)
class Kept:
    """A request, and its hit tokens by ``SIZES``; None: it has no hashes, or the cache's size is not known."""

    record: Record
    end_ms: float
    hits: IntArray | None

    @property
    def numbers(self) -> int:
        record = self.record
        hashes = len(record.block_hashes or ()) + len(record.output_block_hashes or ())
        return 2 * len(record.itl_ms) + hashes

    @property
    def arrival_ms(self) -> float:
        return self.record.arrival_ms or 0.0


class Window:
    """The requests that ended in the last ``length_ms``, of at most ``MOST_REQUESTS`` and ``MOST_NUMBERS``.

    Requests of part of the sessions would leave out part of each batch, so of faster traffic a shorter time is kept.
    """

    def __init__(self, length_ms: float) -> None:
        self.latest_ms = -np.inf
        self.begin_ms = -np.inf
        """All requests in flight at this time or later are kept, once they have ended."""
        self.is_short = False
        """The bounds, not the time, took the last request out."""
        self._length_ms = length_ms
        self._kept: deque[Kept] = deque()
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Kept]:
        return iter(self._kept)

    def take(self, one: Kept) -> None:
        self._kept.append(one)
        self._numbers += one.numbers
        self.latest_ms = max(self.latest_ms, one.end_ms)
        while (is_many := self._is_full) or self._kept[0].end_ms < self.latest_ms - self._length_ms:
            gone = self._kept.popleft()
            self._numbers -= gone.numbers
            self.begin_ms = max(self.begin_ms, gone.end_ms)
            self.is_short = is_many

    @property
    def _is_full(self) -> bool:
        return len(self._kept) > MOST_REQUESTS or (self._numbers > MOST_NUMBERS and len(self._kept) > 1)

    @property
    def known_until_ms(self) -> float:
        """Time by which all arrived requests have ended: as long ago as the longest took, or half of the window."""
        longest_ms = max((one.end_ms - one.arrival_ms for one in self._kept), default=0.0)
        first_ms = min((one.arrival_ms for one in islice(self._kept, 1)), default=self.latest_ms)
        return self.latest_ms - min(longest_ms, (self.latest_ms - max(self.begin_ms, first_ms)) / 2)


def cache_sizes(meta: Meta, engine: EngineConfig, *, size_known: bool) -> CacheSizes | str:
    """Return an empty order of use, or the reason why other cache sizes cannot be told."""
    if not size_known:
        return "other cache sizes: the trace does not tell num_gpu_blocks; give --num-gpu-blocks"
    if not engine.enable_prefix_caching:
        return "other cache sizes: the engine's prefix caching is off"
    if meta.block_size is None:
        return "other cache sizes: the trace has no block hashes"
    try:
        return CacheSizes(meta, engine)
    except InputError as error:
        return f"other cache sizes: {error}"
