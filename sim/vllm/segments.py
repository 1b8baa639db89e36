"""vLLM's block pool by segments: rules 1 to 8 of docs/simulator.md, at a cost per branch of a chain, not per block.

A segment is a run of a chain's blocks that no request has split yet. Its blocks are cached in one or more copies
(rule 7), ordered by when each was cached. All blocks of a copy have the same holders and are next to each other in the
free block queue, leaf first. A prefix hit, an eviction or a second computation that ends within a segment splits the
segment and each of its copies. The only holder of a segment may extend it with the next blocks that it fills.

A request holds copies, root first. ``deeper`` leads from a copy to the copy that was split off last: the request still
holds those blocks. Uncached blocks are only counted: blocks that a request has not filled, and blocks at the head of
the free block queue.

mypyc compiles this module; it runs uncompiled, too.
"""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from measure.cache.hashtable import BoxedVec

SHARED: Final = -1
"""Owner of a segment with recorded block hashes: every request may hit it."""
NO_INDEX: Final = -2
"""Index of a request that never looks up its private blocks: the prefix cache does not index them."""


class BlockTable:
    """Block table of a request: its chain of block keys, and the cached blocks that it holds.

    The key of block d is ``keys[first_key + d]``, a 64-bit hash as a signed number, for ``num_keys`` blocks. Later
    blocks are private: only the request of this ``index`` looks up their keys.
    """

    def __init__(self, keys: BoxedVec, index: i64 = NO_INDEX, first_key: i64 = 0, num_keys: i64 = 0) -> None:
        self.keys: vec[i64] = keys
        self.index: i64 = index
        self.first_key: i64 = first_key
        self.num_keys: i64 = num_keys
        self.num_blocks: i64 = 0
        """Blocks that the request holds, including blocks that are not full."""
        self.preemptions: i64 = 0
        self.blocks: list[Hold] = []
        """Cached blocks, root first."""
        self.tail: Copy | None = None
        """First copy of the last hold, or a deeper copy; the next full blocks may extend it."""


class Segment:
    """Blocks ``start`` to ``end`` of a chain. ``owner`` SHARED: the key of block d is ``keys[base + d]``; else private
    blocks of the request with that index. ``copy``: the copy cached first. ``older``: the segment cached before under
    the same first key, or itself; only keys that are not chained have an older segment."""

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
    """Copy of a segment's blocks, in the free block queue or held. ``after``: the next copy in eviction order.
    ``deeper``: the copy that was split off last, or itself. Twins: the ring of a segment's copies."""

    def __init__(self, segment: Segment) -> None:
        self.segment: Segment = segment
        self.references: i64 = 0
        self.deeper: Copy = self
        self.before: Copy = self
        self.after: Copy = self
        self.previous_twin: Copy = self
        self.next_twin: Copy = self


class Hold:
    """Blocks that a request holds: from the end of its previous hold to ``end``."""

    def __init__(self, copy: Copy, end: i64) -> None:
        self.copy: Copy = copy
        self.end: i64 = end


class SegmentPool:
    """Free block queue and prefix cache of ``num_gpu_blocks`` blocks, the null block included (rule 1)."""

    def __init__(self, num_gpu_blocks: i64, enable_prefix_caching: bool = True) -> None:
        self.num_blocks: i64 = num_gpu_blocks - 1
        self.num_free: i64 = num_gpu_blocks - 1
        self.num_unhashed: i64 = num_gpu_blocks - 1
        """Uncached blocks at the head of the free block queue."""
        self.evicted_blocks: i64 = 0
        self.num_repeated: i64 = 0
        """References to blocks beyond the first: blocks that requests share."""
        self.idle_hits: i64 = 0
        """Idle blocks of the last prefix hit: no request holds them."""
        self.not_chained: bool = False
        """True once a key occurred at two depths: free queue and holds are unreliable, and the caller stops."""
        self._caching: bool = enable_prefix_caching
        self._queue: Copy = Copy(Segment(SHARED, vec[i64](), 0, 0, 0))
        """Sentinel: both ends of the free block queue."""
        self._shared: dict[int, Segment] = {}
        """Prefix cache by first key: the segment that was cached last."""
        self._private: dict[tuple[int, int], Segment] = {}
        """Private segments by request index and depth."""

    def lookup(self, request: BlockTable, most: i64) -> i64:
        """Rule 6, prefix hit: count the leading cached blocks of the chain, at most ``most``; set ``idle_hits``."""
        self.idle_hits = 0
        depth: i64 = 0
        while self._caching and depth < most:
            segment = self._segment_at(request, depth)
            if segment is None:
                break
            end = self._matching_end(request, segment, depth, most)
            if segment.copy.references == 0:
                self.idle_hits += end - depth
            depth = end
        return depth

    def touch(self, request: BlockTable, most: i64) -> i64:
        """Rules 4 and 7: let the request hold its prefix hit (vLLM's ``touch``), at most ``most`` blocks. Idle blocks
        leave the free block queue. Return the number of blocks."""
        depth: i64 = 0
        while depth < most:
            segment = self._segment_at(request, depth)
            if segment is None:
                break
            end = self._matching_end(request, segment, depth, most)
            if end < segment.end:
                self._split(segment, end)
            copy = segment.copy
            if copy.references == 0:
                _unlink(copy)
                self.num_free -= end - depth
            else:
                self.num_repeated += end - depth
            self._add_hold(request, copy, end)
            depth = end
        return depth

    def allocate(self, count: i64) -> None:
        """Rule 2: pop blocks from the head of the free block queue and evict their prefixes (vLLM's
        ``get_new_blocks``). The caller has checked ``num_free``."""
        if self.not_chained:
            return
        if count > self.num_free:
            raise ValueError(f"cannot allocate {count} blocks: {self.num_free} are free")
        self.num_free -= count
        unhashed = min(count, self.num_unhashed)
        self.num_unhashed -= unhashed
        count -= unhashed
        while count > 0:
            copy = self._queue.after
            segment = copy.segment
            blocks = segment.end - segment.start
            if blocks > count and copy.next_twin is not copy:
                self._split(segment, segment.end - count)
                continue
            num_evicted = min(blocks, count)
            self.evicted_blocks += num_evicted
            if num_evicted < blocks:
                segment.end -= num_evicted
            else:
                self._evict(copy)
            count -= num_evicted

    def cache_full_blocks(self, request: BlockTable, start: i64, end: i64) -> None:
        """Rule 5: add a request's full blocks from ``start``, the end of its last hold, to the prefix cache."""
        depth: i64 = start
        while self._caching and depth < end and not self.not_chained:
            is_shared = depth < request.num_keys
            match_end = min(end, request.num_keys) if is_shared else end
            segment = self._segment_at(request, depth)
            if segment is None:  # nor is a deeper block cached: a block is always evicted before its parent
                self._extend(request, depth, match_end)
                depth = match_end
                continue
            match_end = self._matching_end(request, segment, depth, match_end)
            if match_end < segment.end:
                self._split(segment, match_end)
            self._add_hold(request, _add_twin(segment), match_end)
            depth = match_end

    def free_blocks(self, request: BlockTable) -> None:
        """Rule 3: free a request's blocks, leaf first; blocks without another holder join the free block queue."""
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
        """Empty the prefix cache (vLLM's ``reset_prefix_cache``); False, and no change, while a block is held."""
        if self.num_free != self.num_blocks:
            return False
        while self._queue.after is not self._queue:
            self._evict(self._queue.after)
        self.num_unhashed = self.num_free
        return True

    def _segment_at(self, request: BlockTable, depth: i64) -> Segment | None:
        """Return the segment that begins with the request's block ``depth``; None: the block is not cached."""
        if depth >= request.num_keys:  # only a preempted request looks up its private blocks
            return self._private.get((request.index, depth)) if request.preemptions > 0 else None
        segment = self._shared.get(request.keys[request.first_key + depth])
        if segment is not None and segment.start != depth:
            self.not_chained = True
            return None
        return segment

    def _matching_end(self, request: BlockTable, segment: Segment, depth: i64, most: i64) -> i64:
        """Return the depth up to which a segment that begins at ``depth`` matches the request's prefix, at most
        ``most``. Binary search: keys are chained, so all keys before equal keys are equal."""
        end = min(segment.end, most)
        if segment.owner != SHARED:
            return end
        end = min(end, request.num_keys)
        keys = request.keys
        segment_keys = segment.keys
        first_key = request.first_key
        base = segment.base
        if keys[first_key + end - 1] == segment_keys[base + end - 1]:
            return end
        same = depth
        differs = end - 1
        while differs - same > 1:
            middle = (same + differs) // 2
            if keys[first_key + middle] == segment_keys[base + middle]:
                same = middle
            else:
                differs = middle
        return same + 1

    def _extend(self, request: BlockTable, start: i64, end: i64) -> None:
        """Cache blocks under new keys: extend the request's last copy, or add a new segment."""
        owner: i64 = SHARED if start < request.num_keys else request.index
        base: i64 = request.first_key if start < request.num_keys else 0
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
        self._index(segment)
        self._add_hold(request, segment.copy, end)

    def _add_hold(self, request: BlockTable, copy: Copy, end: i64) -> None:
        copy.references += 1
        request.blocks.append(Hold(copy, end))
        request.tail = copy

    def _split(self, segment: Segment, depth: i64) -> None:
        """Split a segment at ``depth``; of each free copy the deeper blocks are evicted first."""
        deeper = Segment(segment.owner, segment.keys, segment.base, depth, segment.end)
        segment.end = depth
        self._index(deeper)
        copy, deeper_copy = segment.copy, deeper.copy
        while True:
            deeper_copy.references = copy.references
            deeper_copy.deeper = copy.deeper
            copy.deeper = deeper_copy
            if copy.references == 0:
                _link_after(copy.before, deeper_copy)
            copy = copy.next_twin
            if copy is segment.copy:
                break
            deeper_copy = _add_twin(deeper)

    def _evict(self, copy: Copy) -> None:
        """Evict a free copy from the prefix cache; with its last copy, the segment."""
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
            self._unindex(segment)
            segment.copy, segment.older = self._queue, self._queue.segment
        # Break reference cycles, so that the copy is freed without the garbage collector.
        copy.deeper = copy.next_twin = copy.previous_twin = copy.before = copy.after = self._queue

    def _index(self, segment: Segment) -> None:
        """Add a segment to the prefix cache, by its first block."""
        if segment.owner == SHARED:
            key = segment.first_key = segment.keys[segment.base + segment.start]
            older = self._shared.setdefault(key, segment)
            if older is not segment:
                segment.older = older
                self._shared[key] = segment
        elif segment.owner != NO_INDEX:
            self._private[segment.owner, segment.start] = segment

    def _unindex(self, segment: Segment) -> None:
        if segment.owner != SHARED:
            self._private.pop((segment.owner, segment.start), None)
            return
        newer = self._shared[segment.first_key]
        if newer is segment:
            del self._shared[segment.first_key]
            if segment.older is not segment:
                self._shared[segment.first_key] = segment.older
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
    """Add a copy of a segment, after its earlier copies (rule 7)."""
    copy = Copy(segment)
    first = segment.copy
    last = first.previous_twin
    last.next_twin = copy
    copy.previous_twin = last
    copy.next_twin = first
    first.previous_twin = copy
    return copy
