"""A router's own index of prefixes: blocks it sent to each engine, the last used ones and those in flight."""

from collections import OrderedDict, deque
from collections.abc import Sequence


class Holders:
    """Engines that hold each key, as bits: one look-up tells of all of them.

    Keys are chained. An engine that holds a key holds all keys before it in every chain.
    """

    def __init__(self, engines: int) -> None:
        self.bits: dict[int, int] = {}
        self._engines = engines

    def overlaps(self, blocks: Sequence[int]) -> list[int]:
        """Return, by place, the leading blocks that the engine holds."""
        found = [0] * self._engines
        start, held = 0, self.bits.get(blocks[0], 0) if blocks else 0
        while held:
            end = self._extent(blocks, start, held)
            further = self.bits.get(blocks[end], 0) if end < len(blocks) else 0
            left = held & ~further
            while left:
                lowest = left & -left
                found[lowest.bit_length() - 1] = end
                left ^= lowest
            start, held = end, further
        return found

    def drop(self, key: int, bit: int) -> None:
        left = self.bits[key] & ~bit
        if left:
            self.bits[key] = left
        else:
            del self.bits[key]

    def _extent(self, blocks: Sequence[int], start: int, held: int) -> int:
        """Return the number of leading blocks that all engines of ``held`` hold; they hold ``blocks[start]``."""
        get, low, step = self.bits.get, start, 1
        # Engines of ``held`` are those of the key at ``start``; further along there are only fewer.
        while low + step < len(blocks) and get(blocks[low + step], 0) == held:
            low, step = low + step, 2 * step
        high = min(low + step, len(blocks))
        while high - low > 1:
            middle = (low + high) // 2
            if get(blocks[middle], 0) == held:
                low = middle
            else:
                high = middle
        return high


class ActiveBlocks:
    """Blocks of the requests in flight on each engine: a block that several of them hold is one."""

    def __init__(self, engines: int) -> None:
        self._users: list[dict[int, int]] = [{} for _ in range(engines)]
        """Requests in flight that hold each key."""
        self._holders = Holders(engines)
        self._held = [0] * engines
        """Keys held, each as often as requests hold it."""

    def repeated(self, blocks: Sequence[int]) -> list[int]:
        """Return, by place, the blocks held more than once if a request with ``blocks`` were sent there."""
        overlaps = self._holders.overlaps(blocks)
        return [
            held - len(users) + overlap for held, users, overlap in zip(self._held, self._users, overlaps, strict=True)
        ]

    def add(self, place: int, blocks: Sequence[int]) -> None:
        users, bits, bit = self._users[place], self._holders.bits, 1 << place
        self._held[place] += len(blocks)
        for key in blocks:
            count = users.get(key, 0)
            users[key] = count + 1
            if not count:
                bits[key] = bits.get(key, 0) | bit

    def remove(self, place: int, blocks: Sequence[int]) -> None:
        users, bit = self._users[place], 1 << place
        self._held[place] -= len(blocks)
        for key in blocks:
            count = users[key]
            if count > 1:
                users[key] = count - 1
            else:
                del users[key]
                self._holders.drop(key, bit)


class PrefixIndex:
    """Blocks that each engine is taken to hold: the ``capacity_blocks`` used last, leaf before root.

    A request's blocks count from ``lag_s`` after it was sent. The index knows what the router sent, not what an engine
    evicted. A chain's root is always used after its leaves, so an engine that holds a key holds all keys before it.
    """

    def __init__(self, engines: int, *, capacity_blocks: int, lag_s: float = 0.0) -> None:
        self._capacity, self._lag_s = capacity_blocks, lag_s
        self._used: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engines)]
        """Keys of each engine, the longest unused first."""
        self._holders = Holders(engines)
        self._coming: deque[tuple[float, int, Sequence[int]]] = deque()

    def overlaps(self, blocks: Sequence[int], now_s: float) -> list[int]:
        """Return, by place, the leading blocks that the engine is taken to hold."""
        if self._coming:
            self._take_in(now_s)
        return self._holders.overlaps(blocks)

    def sent(self, place: int, blocks: Sequence[int], now_s: float) -> None:
        """Learn that a request with these blocks went to an engine; times may not go back."""
        if self._lag_s:
            self._coming.append((now_s + self._lag_s, place, blocks))
        else:
            self._use(place, blocks)

    def forget(self, place: int) -> None:
        """Empty an engine's part, requests on their way included."""
        self._coming = deque(coming for coming in self._coming if coming[1] != place)
        used = self._used[place]
        for key in used:
            self._holders.drop(key, 1 << place)
        used.clear()

    def check_integrity(self) -> None:
        assert all(len(used) <= self._capacity for used in self._used)
        holders: dict[int, int] = {}
        for place, used in enumerate(self._used):
            for key in used:
                holders[key] = holders.get(key, 0) | 1 << place
        assert holders == self._holders.bits

    def _take_in(self, now_s: float) -> None:
        while self._coming and self._coming[0][0] <= now_s:
            _, place, blocks = self._coming.popleft()
            self._use(place, blocks)

    def _use(self, place: int, blocks: Sequence[int]) -> None:
        used, bits, bit = self._used[place], self._holders.bits, 1 << place
        for key in reversed(blocks):
            if key in used:
                used.move_to_end(key)
            else:
                used[key] = None
                bits[key] = bits.get(key, 0) | bit
        while len(used) > self._capacity:
            self._holders.drop(used.popitem(last=False)[0], bit)
