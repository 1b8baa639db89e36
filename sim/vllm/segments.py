"""vLLM's block pool by segments: rules 1 to 8 of docs/simulator.md, at a cost that follows branches of chains.

A segment is a run of a chain's blocks that no request has told apart yet. Its blocks are cached in one or more copies
(rule 7), in line in the order in which they were cached. All blocks of a copy have the same holders and are next to
each other in the free queue, leaf first. A hit, an eviction or a second computation that ends within a segment cuts it
in two, each copy with it. The blocks that its only holder fills next may lengthen it.

A request holds copies from its root down. ``deeper`` leads from a copy to the part that was cut off since: held blocks
stay held. Blocks that hold nothing known are only counted: those that a request has not filled, and those at the
queue's head.

mypyc compiles this module; it runs uncompiled, too.
"""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from measure.cache.hashtable import BoxedVec

KNOWN: Final = -1
"""Owner of a segment whose keys the trace knows: any request may hit it."""
NO_INDEX: Final = -2
"""Index of a request that never looks up its private blocks: they need not be findable."""


class BlockTable:
    """Blocks of a request: its chain of keys, and the cached blocks that it holds.

    Key number d of its chain is ``keys[first_key + d]``, a 64-bit hash as a signed number, for ``known_keys`` blocks.
    The blocks behind these are private: they have keys that only the request of this ``index`` looks up.
    """

    def __init__(self, keys: BoxedVec, index: i64 = NO_INDEX, first_key: i64 = 0, known_keys: i64 = 0) -> None:
        self.keys: vec[i64] = keys
        self.index: i64 = index
        self.first_key: i64 = first_key
        self.known_keys: i64 = known_keys
        self.num_blocks: i64 = 0
        """Blocks that it holds, those included that are not full yet."""
        self.preemptions: i64 = 0
        self.blocks: list[Hold] = []
        """Its cached blocks, root first."""
        self.tail: Copy | None = None
        """Copy that its last hold begins with, or a deeper one, which its next full blocks may lengthen."""


class Segment:
    """Blocks ``start`` to ``end`` of a chain, whose key number d is ``keys[base + d]`` if ``owner`` is KNOWN; else they
    are private blocks of the request with that index. ``copy``: the copy that was cached first. ``older``: the segment
    cached before under the same first key, or itself; only keys that are not chained have one."""

    def __init__(self, owner: i64, keys: vec[i64], base: i64, start: i64, end: i64) -> None:
        self.owner: i64 = owner
        self.keys: vec[i64] = keys
        self.base: i64 = base
        self.start: i64 = start
        self.end: i64 = end
        self.first_key: i64 = 0
        self.copy: Copy = Copy(self)
        self.older: Segment = self


class Copy:
    """Blocks of a segment in the free queue or held; of a free copy, ``after`` is the next to be taken. ``deeper``: the
    copy of the blocks that were cut off last, or itself. Twins are the copies of a segment, a ring."""

    def __init__(self, segment: Segment) -> None:
        self.segment: Segment = segment
        self.references: i64 = 0
        self.deeper: Copy = self
        self.before: Copy = self
        self.after: Copy = self
        self.previous_twin: Copy = self
        self.next_twin: Copy = self


class Hold:
    """Blocks of a chain up to ``end`` that a request holds, from where its hold before ends."""

    def __init__(self, copy: Copy, end: i64) -> None:
        self.copy: Copy = copy
        self.end: i64 = end


class SegmentPool:
    """The free queue and the prefix cache of ``num_gpu_blocks`` blocks, the null block included (rule 1)."""

    def __init__(self, num_gpu_blocks: i64, enable_prefix_caching: bool = True) -> None:
        self.num_blocks: i64 = num_gpu_blocks - 1
        self.num_free: i64 = num_gpu_blocks - 1
        self.num_unhashed: i64 = num_gpu_blocks - 1
        """Blocks at the queue's head that hold nothing known."""
        self.evicted_blocks: i64 = 0
        self.num_repeated: i64 = 0
        """Holds of blocks that another request held before."""
        self.idle_hits: i64 = 0
        """Blocks of the last lookup that no request holds."""
        self.not_chained: bool = False
        """True once a key was met at two depths: neither the queue nor the holds are reliable, the caller stops."""
        self._caching: bool = enable_prefix_caching
        self._queue: Copy = Copy(Segment(KNOWN, vec[i64](), 0, 0, 0))
        """Both ends of the free queue."""
        self._known: dict[int, Segment] = {}
        """By first key: the segment that was cached last."""
        self._private: dict[tuple[int, int], Segment] = {}
        """By request and depth."""

    def lookup(self, request: BlockTable, most: i64) -> i64:
        """Rule 6: count the leading cached blocks of the request's chain, at most ``most``, and set ``idle_hits``."""
        self.idle_hits = 0
        depth: i64 = 0
        while self._caching and depth < most:
            segment = self._segment_at(request, depth)
            if segment is None:
                break
            end = self._agree_until(request, segment, depth, most)
            if segment.copy.references == 0:
                self.idle_hits += end - depth
            depth = end
        return depth

    def hold(self, request: BlockTable, most: i64) -> i64:
        """Rules 4 and 7: give the request the leading cached blocks of its chain, at most ``most``.

        Blocks without a holder leave the free queue. Return the number of blocks.
        """
        depth: i64 = 0
        while depth < most:
            segment = self._segment_at(request, depth)
            if segment is None:
                break
            end = self._agree_until(request, segment, depth, most)
            if end < segment.end:
                self._cut(segment, end)
            copy = segment.copy
            if copy.references == 0:
                _unlink(copy)
                self.num_free -= end - depth
            else:
                self.num_repeated += end - depth
            self._add_hold(request, copy, end)
            depth = end
        return depth

    def take(self, count: i64) -> None:
        """Rule 2: take blocks from the queue's head, evicting what they cached. The caller has checked num_free."""
        if self.not_chained:
            return
        if count > self.num_free:
            raise ValueError(f"cannot take {count} blocks: {self.num_free} are free")
        self.num_free -= count
        unhashed = min(count, self.num_unhashed)
        self.num_unhashed -= unhashed
        count -= unhashed
        while count > 0:
            copy = self._queue.after
            segment = copy.segment
            blocks = segment.end - segment.start
            if blocks > count and copy.next_twin is not copy:
                self._cut(segment, segment.end - count)
                continue
            taken = min(blocks, count)
            self.evicted_blocks += taken
            if taken < blocks:
                segment.end -= taken
            else:
                self._forget(copy)
            count -= taken

    def publish(self, request: BlockTable, start: i64, end: i64) -> None:
        """Rule 5: make a request's full blocks from ``start``, where its last hold ends, to ``end`` findable."""
        depth: i64 = start
        while self._caching and depth < end and not self.not_chained:
            is_known = depth < request.known_keys
            until = min(end, request.known_keys) if is_known else end
            segment = self._segment_at(request, depth)
            if segment is None:  # then nothing deeper is cached either: a block's parent is always evicted later
                self._lengthen(request, depth, until)
                depth = until
                continue
            until = self._agree_until(request, segment, depth, until)
            if until < segment.end:
                self._cut(segment, until)
            self._add_hold(request, _add_twin(segment), until)
            depth = until

    def release(self, request: BlockTable) -> None:
        """Rule 3: release a request's blocks, leaf first; blocks without another holder become free."""
        last = self._queue.before
        hashed: i64 = 0
        for hold in request.blocks:
            copy = hold.copy
            hashed = hold.end
            while True:
                blocks = copy.segment.end - copy.segment.start
                copy.references -= 1
                if copy.references == 0:
                    _link_after(last, copy)  # before the copies nearer the root
                    self.num_free += blocks
                else:
                    self.num_repeated -= blocks
                if copy.segment.end == hashed:
                    break
                copy = copy.deeper
        request.blocks.clear()
        request.tail = None
        unhashed = request.num_blocks - hashed
        self.num_free += unhashed
        self.num_unhashed += unhashed

    def reset(self) -> bool:
        """Forget every key, unless a block is held: then change nothing and return False, as vLLM does."""
        if self.num_free != self.num_blocks:
            return False
        while self._queue.after is not self._queue:
            self._forget(self._queue.after)
        self.num_unhashed = self.num_free
        return True

    def _segment_at(self, request: BlockTable, depth: i64) -> Segment | None:
        """Return the segment that begins with the request's block ``depth``; None: that block is not cached."""
        if depth >= request.known_keys:  # only a preempted request comes back to its private blocks
            return self._private.get((request.index, depth)) if request.preemptions > 0 else None
        segment = self._known.get(request.keys[request.first_key + depth])
        if segment is not None and segment.start != depth:
            self.not_chained = True
            return None
        return segment

    def _agree_until(self, request: BlockTable, segment: Segment, depth: i64, most: i64) -> i64:
        """Depth up to which a segment that begins at ``depth`` agrees with the request's chain, at most ``most``.

        Before equal keys all keys are equal.
        """
        end = min(segment.end, most)
        if segment.owner != KNOWN:
            return end
        end = min(end, request.known_keys)
        keys = request.keys
        segment_keys = segment.keys
        first_key = request.first_key
        other = segment.base
        if keys[first_key + end - 1] == segment_keys[other + end - 1]:
            return end
        same = depth
        differs = end - 1
        while differs - same > 1:
            middle = (same + differs) // 2
            if keys[first_key + middle] == segment_keys[other + middle]:
                same = middle
            else:
                differs = middle
        return same + 1

    def _lengthen(self, request: BlockTable, start: i64, end: i64) -> None:
        """Cache blocks under new keys: the request's last copy gets longer, or a new segment begins."""
        owner: i64 = KNOWN if start < request.known_keys else request.index
        base: i64 = request.first_key if start < request.known_keys else 0
        tail = request.tail
        if tail is not None:
            while tail.segment.end != start:
                tail = tail.deeper
            request.tail = tail
            segment = tail.segment
            if segment.owner == owner and tail.references == 1 and tail.next_twin is tail:
                segment.keys = request.keys
                segment.base = base
                segment.end = end
                request.blocks[-1].end = end
                return
        segment = Segment(owner, request.keys, base, start, end)
        self._enter(segment)
        self._add_hold(request, segment.copy, end)

    def _add_hold(self, request: BlockTable, copy: Copy, end: i64) -> None:
        copy.references += 1
        request.blocks.append(Hold(copy, end))
        request.tail = copy

    def _cut(self, segment: Segment, depth: i64) -> None:
        """Make two segments of one; the deeper part of each copy that is free stands just before the other."""
        deeper = Segment(segment.owner, segment.keys, segment.base, depth, segment.end)
        segment.end = depth
        self._enter(deeper)
        copy, part = segment.copy, deeper.copy
        while True:
            part.references = copy.references
            part.deeper = copy.deeper
            copy.deeper = part
            if copy.references == 0:
                _link_after(copy.before, part)
            copy = copy.next_twin
            if copy is segment.copy:
                break
            part = _add_twin(deeper)

    def _forget(self, copy: Copy) -> None:
        """Remove a free copy; with its last copy, the segment."""
        segment = copy.segment
        following = copy.next_twin
        previous = copy.previous_twin
        _unlink(copy)
        if following is not copy:
            previous.next_twin = following
            following.previous_twin = previous
            if segment.copy is copy:
                segment.copy = following
        else:
            self._leave(segment)
            segment.copy, segment.older = self._queue, self._queue.segment
        # No cycle is left, so that it goes without the garbage collector.
        copy.deeper = copy.next_twin = copy.previous_twin = copy.before = copy.after = self._queue

    def _enter(self, segment: Segment) -> None:
        """Make a segment findable by its first block."""
        if segment.owner == KNOWN:
            key = segment.first_key = segment.keys[segment.base + segment.start]
            older = self._known.setdefault(key, segment)
            if older is not segment:
                segment.older = older
                self._known[key] = segment
        elif segment.owner != NO_INDEX:
            self._private[segment.owner, segment.start] = segment

    def _leave(self, segment: Segment) -> None:
        if segment.owner != KNOWN:
            self._private.pop((segment.owner, segment.start), None)
            return
        newer = self._known[segment.first_key]
        if newer is segment:
            del self._known[segment.first_key]
            if segment.older is not segment:
                self._known[segment.first_key] = segment.older
            return
        while newer.older is not segment:
            newer = newer.older
        newer.older = newer if segment.older is segment else segment.older


def _link_after(before: Copy, copy: Copy) -> None:
    after = before.after
    before.after = copy
    copy.before = before
    copy.after = after
    after.before = copy


def _unlink(copy: Copy) -> None:
    before = copy.before
    after = copy.after
    before.after = after
    after.before = before


def _add_twin(segment: Segment) -> Copy:
    """Add a copy of a segment, the last in line (rule 7)."""
    copy = Copy(segment)
    first = segment.copy
    last = first.previous_twin
    last.next_twin = copy
    copy.previous_twin = last
    copy.next_twin = first
    first.previous_twin = copy
    return copy
