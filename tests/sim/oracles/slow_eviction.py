"""A pool that evicts by a policy, one request at a time, said plainly: lists that are searched whole."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sim.vllm.eviction import POLICIES, parse_evict


@dataclass(eq=False)
class Block:
    """A cached block, or an evicted one whose key is kept."""

    key: object
    above: "Block | None"
    below: int = 0
    depth: int = 0
    hits: int = 0
    level: int = 0
    most_depth: int = 0
    used_ms: float = -math.inf
    held: bool = True
    came_back: bool = False
    known: bool = True
    """Others may have its key."""

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
    """``usable`` blocks of ``block_size`` tokens; ``future``: all requests, for Belady's policy."""

    usable: int
    evict: str
    block_size: int
    future: Sequence[Wanted] = ()
    cached: dict[object, Block] = field(default_factory=dict)
    evicted: int = 0
    order: list[Block] = field(default_factory=list)
    """Blocks as the policy has them in line."""
    main: list[Block] = field(default_factory=list)
    """Second line of ARC and S3-FIFO."""
    forgotten: list[object] = field(default_factory=list)
    forgotten_main: list[object] = field(default_factory=list)
    asked: list[object] = field(default_factory=list)
    hand: Block | None = None
    aimed: float = 0.0
    returning: int = 0
    of_second: bool = False
    served: int = 0
    now_ms: float = 0.0
    idle: list[tuple[int, float, bool]] = field(default_factory=list)
    """Idle times that ended, under ``workload``: level, ms, and whether with a use."""
    left: dict[object, Block] = field(default_factory=dict)
    """Blocks that ``workload`` has evicted and not forgotten, in that order."""

    def __post_init__(self) -> None:
        eviction = parse_evict(self.evict)
        self.name, self.limit = POLICIES[eviction.policy], eviction.limit

    @property
    def num_free(self) -> int:
        return self.usable - len(self.cached)

    def serve(self, wanted: Wanted) -> int:
        hits = 0
        self.now_ms = wanted.arrival_ms
        held: list[Block] = []
        for key in wanted.keys[: wanted.most_hits]:
            block = self.cached.get(key)
            if block is None or (self.name == "ttl" and block.used_ms + self.limit < wanted.arrival_ms):
                break
            hits += 1
            held.append(block)
            self._hold(block)
        seen = self._count_seen(wanted, hits) if self.name == "workload" else 0
        self._recall(wanted, hits)
        self._make_room(wanted.num_blocks - hits)
        above = held[-1] if held else None
        for depth in range(hits, len(wanted.keys)):
            key = wanted.keys[depth]
            block = self.cached.get(key)
            if block is None:
                block = Block(key, above, depth=depth, known=depth < wanted.known)
                block.came_back = self._came_back(key)
                self.left.pop(key, None)
                if block.came_back and self.name == "arc":
                    for one in (block, *held):
                        one.hits = max(one.hits, 1)
                self.cached[key] = block
                if above is not None:
                    above.below += 1
            else:
                self._hold(block)
            held.append(block)
            above = block
        for block in reversed(held):
            block.held = False
            block.used_ms = wanted.arrival_ms
            block.most_depth = max(block.most_depth, wanted.num_blocks)
            if self.name == "workload":
                block.level = min(int(math.log2(1 + wanted.num_blocks - seen)), 7)
            self._join(block)
        self.served += 1
        return hits

    def _hold(self, block: Block) -> None:
        self._end_idle(block, returned=True)
        block.hits += 1
        block.held = True
        if self.name not in ("fifo", "sieve", "s3-fifo"):
            for line in (self.order, self.main):
                if block in line:
                    line.remove(block)

    def _join(self, block: Block) -> None:
        if block in self.order or block in self.main:
            return
        small_full = self.evicted == 0 and len(self.order) >= self.usable // 10
        if (self.name == "s3-fifo" and (block.came_back or small_full)) or (self.name == "arc" and block.hits):
            self.main.append(block)
            return
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
            evict = {
                "arc": self._evict_arc,
                "sieve": self._evict_sieve,
                "s3-fifo": self._evict_s3,
                "fifo": self._evict_fifo,
                "workload": self._evict_unlikely,
            }.get(self.name, self._evict_least)
            evict()
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
        if self.name == "tail":
            size = self.block_size
            return 0 if block.depth * size >= block.most_depth * size - self.limit else 1
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

    def _evict_unlikely(self) -> None:
        oldest = {block.level: block for block in reversed(self.order)}
        block = min((one for one in oldest.values() if not one.is_bound), key=self._unlikely)
        self._drop(block)
        if not block.known:
            self._end_idle(block, returned=False)
            return
        self.left[block.key] = block
        if len(self.left) > 2 * self.usable:
            self._end_idle(self.left.pop(next(iter(self.left))), returned=False)

    def _unlikely(self, block: Block) -> tuple[float, float, int]:
        """Best rate of returns, after so long, of blocks as this one is; of equals the oldest first."""
        age = self._age(self.now_ms - block.used_ms)
        ages = [(self._age(idle_ms), returned) for level, idle_ms, returned in self.idle if level == block.level]
        reached = sum(one >= age for one, _ in ages)
        by = {end: sum(age <= one <= end for one, was_used in ages if was_used) for end in range(age, 24)}
        return max((by[end] + 1) / ((reached + 1) * 2.0**end) for end in by), block.used_ms, block.level

    @staticmethod
    def _age(idle_ms: float) -> int:
        return min(max(math.floor(math.log2(max(idle_ms, 1.0))) - 4, 0), 23)

    def _end_idle(self, block: Block, *, returned: bool) -> None:
        self.idle.append((block.level, self.now_ms - block.used_ms, returned))

    def _count_seen(self, wanted: Wanted, hits: int) -> int:
        seen = hits
        for key in wanted.keys[hits : wanted.known]:
            seen += key in self.cached or key in self.left
            if key in self.left:
                self._end_idle(self.left.pop(key), returned=True)
        return seen

    def _evict_fifo(self) -> None:
        while self.order[0].is_bound:
            self.order.append(self.order.pop(0))
        self._drop(self.order[0])

    def _evict_sieve(self) -> None:
        place = self.order.index(self.hand) if self.hand else 0
        while self.order[place].is_bound or self.order[place].hits:
            if not self.order[place].is_bound:
                self.order[place].hits = 0
            place = (place + 1) % len(self.order)
        self.hand = self.order[place + 1] if place + 1 < len(self.order) else None
        self._drop(self.order[place])

    def _evict_s3(self) -> None:
        if len(self.main) <= self.usable - self.usable // 10 and self._evict_small():
            return
        while not self._evict_main():
            if self._evict_small():
                return

    def _evict_small(self) -> bool:
        while self.order:
            block = self.order[0]
            if not block.is_bound and block.hits < 2:
                self._drop(block)
                if block.known:
                    if self.forgotten and len(self.forgotten) >= self.usable * 9 // 10:
                        self.forgotten.pop(0)
                    self.forgotten.append(block.key)
                return True
            block.hits = 0
            self.main.append(self.order.pop(0))
        return False

    def _evict_main(self) -> bool:
        while not all(block.is_bound for block in self.main):
            block = self.main[0]
            if not block.is_bound and block.hits == 0:
                self._drop(block)
                return True
            if not block.is_bound:
                block.hits = min(block.hits, 3) - 1
            self.main.append(self.main.pop(0))
        # Each was passed over once.
        return False

    def _evict_arc(self) -> None:
        returning = self.returning > 0
        if returning:
            self.returning -= 1
        elif len(self.order) + len(self.forgotten) + 1 > self.usable:
            if len(self.order) >= self.usable:
                self._drop(self.order[0])
                return
            self.forgotten = self.forgotten[1:]
        elif len(self.order + self.main) + len(self.forgotten + self.forgotten_main) >= 2 * self.usable:
            self.forgotten_main = self.forgotten_main[1:]
        first, tie = len(self.order), returning and self.of_second
        of_first = first > self.aimed or not self.main or (first == self.aimed and tie) or self.main[0].is_bound
        block = self.order[0] if first and of_first else self.main[0]
        self._drop(block)
        if block.known:
            (self.forgotten if first and of_first else self.forgotten_main).append(block.key)

    def _recall(self, wanted: Wanted, hits: int) -> None:
        self.returning = 0
        for key in wanted.keys[hits : wanted.known]:
            if key not in self.forgotten and key not in self.forgotten_main:
                continue
            self.of_second = key in self.forgotten_main
            if self.of_second:
                self.aimed = max(self.aimed - max(len(self.forgotten) / len(self.forgotten_main), 1), 0)
                self.forgotten_main.remove(key)
            else:
                more = max(len(self.forgotten_main) / len(self.forgotten), 1)
                self.aimed = min(self.aimed + more, self.usable)
                self.forgotten.remove(key)
            self.returning += 1
            self.asked = [*self.asked, key][-self.usable :]

    def _came_back(self, key: object) -> bool:
        for line in (self.asked, self.forgotten, self.forgotten_main):
            if key in line:
                line.remove(key)
                return True
        return False

    def _drop(self, block: Block) -> None:
        assert not (block.held if self.name == "belady" else block.is_bound), "a block that another needs"
        for line in (self.order, self.main):
            if block in line:
                line.remove(block)
        del self.cached[block.key]
        if block.above is not None:
            block.above.below -= 1
