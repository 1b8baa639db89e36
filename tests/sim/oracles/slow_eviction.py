"""A pool that evicts by a policy, one request at a time, said plainly: lists that are searched whole."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sim.vllm.eviction import POLICIES, parse_evict


@dataclass(eq=False)
class Block:
    """A cached block."""

    key: object
    above: "Block | None"
    below: int = 0
    hits: int = 0
    level: int = 0
    used_ms: float = -math.inf
    held: bool = True

    @property
    def is_bound(self) -> bool:
        return self.held or self.below > 0


@dataclass(frozen=True)
class Wanted:
    """A request: keys of all its full blocks, those that may hit, and the blocks that it needs at its end."""

    keys: Sequence[object]
    most_hits: int
    num_blocks: int
    known: int = 0
    """Leading keys that others may have too."""
    arrival_ms: float = 0.0


@dataclass
class SlowPool:
    """``usable`` blocks; ``future``: all requests, for Belady's policy."""

    usable: int
    evict: str
    future: Sequence[Wanted] = ()
    cached: dict[object, Block] = field(default_factory=dict)
    evicted: int = 0
    order: list[Block] = field(default_factory=list)
    """Blocks as the policy has them in line."""
    served: int = 0

    def __post_init__(self) -> None:
        eviction = parse_evict(self.evict)
        self.name, self.limit = POLICIES[eviction.policy], eviction.limit

    @property
    def num_free(self) -> int:
        return self.usable - len(self.cached)

    def serve(self, wanted: Wanted) -> int:
        hits = 0
        held: list[Block] = []
        for key in wanted.keys[: wanted.most_hits]:
            block = self.cached.get(key)
            if block is None or (self.name == "ttl" and block.used_ms + self.limit < wanted.arrival_ms):
                break
            hits += 1
            held.append(block)
            self._hold(block)
        self._make_room(wanted.num_blocks - hits)
        above = held[-1] if held else None
        for key in wanted.keys[hits:]:
            block = self.cached.get(key)
            if block is None:
                block = self.cached[key] = Block(key, above)
                if above is not None:
                    above.below += 1
            else:
                self._hold(block)
            held.append(block)
            above = block
        for block in reversed(held):
            block.held = False
            block.used_ms = wanted.arrival_ms
            self._join(block)
        self.served += 1
        return hits

    def _hold(self, block: Block) -> None:
        block.hits += 1
        block.held = True
        if block in self.order:
            self.order.remove(block)

    def _join(self, block: Block) -> None:
        if self.name == "slru" and block.hits:
            block.level = 1
        self.order.append(block)
        protected = [one for one in self.order if one.level == 1]
        if self.name == "slru" and len(protected) > self.usable * 4 // 5:
            protected[0].hits = protected[0].level = 0
            self.order.remove(protected[0])
            self.order.append(protected[0])

    def _make_room(self, count: int) -> None:
        while self.num_free < count:
            self._evict_least()
            self.evicted += 1

    def _evict_least(self) -> None:
        """Of the idle blocks that none follows, under Belady's of all: the first in line of those of the least rank."""
        idle = self.order if self.name == "belady" else [block for block in self.order if not block.is_bound]
        self._drop(min(idle, key=self._rank))

    def _rank(self, block: Block) -> float:
        if self.name == "lfu":
            return min(block.hits, 255)
        if self.name == "slru":
            return block.level
        if self.name == "belady":
            never = len(self.future)
            number = next((number for number in range(self.served, never) if self._names(number, block)), never)
            return -number if number < never and self._looks_up(number, block) else -never
        return 0

    def _names(self, number: int, block: Block) -> bool:
        one = self.future[number]
        return block.key in one.keys[: one.known]

    def _looks_up(self, number: int, block: Block) -> bool:
        one = self.future[number]
        return block.key in one.keys[: min(one.most_hits, one.known)]

    def _drop(self, block: Block) -> None:
        assert not (block.held if self.name == "belady" else block.is_bound), "a block that another needs"
        self.order.remove(block)
        del self.cached[block.key]
        if block.above is not None:
            block.above.below -= 1
