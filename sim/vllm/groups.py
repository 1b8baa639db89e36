"""Rules of a KV cache group: prefix lookup, block allocation, freeing of blocks behind the window, caching.

Follows vLLM 0.32's ``single_type_kv_cache_manager``, function by function. ``Group`` is full attention; window, chunk
and state groups override which blocks a prefix hit needs, which blocks can be freed, and which are worth caching. mypyc
compiles this module.
"""

from typing import Final

from mypy_extensions import i64

from sim.vllm.blocks import NONE, Block, BlockPool, KeyIndex, Table
from sim.vllm.request import Request

MOST_UNITS: Final = 1 << 31


class HitRules:
    """Numbers of a ``KvLayout``, in tokens. ``unit``: between two block hashes. ``alignment``: granularity of a prefix
    hit. ``block_size``: common multiple of all blocks. ``retain``: between retained states or windows; NONE: all."""

    def __init__(
        self,
        unit: i64,
        alignment: i64,
        block_size: i64,
        retain: i64,
        *,
        drops: bool,
        partial_hits: bool,
        is_alone: bool,
    ) -> None:
        self.unit: i64 = unit
        self.alignment: i64 = alignment
        self.block_size: i64 = block_size
        self.retain: i64 = retain
        self.drops: bool = drops
        """A group drops the last block of a prefix hit."""
        self.partial_hits: bool = partial_hits
        self.is_alone: bool = is_alone
        """There is one group."""


class Group:
    """KV cache group of full attention: a prefix hit is a run of blocks from the start of the prompt.

    ``most``: most blocks that a request holds.
    """

    def __init__(self, pool: BlockPool, rules: HitRules, size: i64, most: i64, *, drops_last: bool) -> None:
        self.pool: BlockPool = pool
        self.rules: HitRules = rules
        self.size: i64 = size
        self.most: i64 = most
        self.drops_last: bool = drops_last
        self.sees_all: bool = False
        self.keeps_state: bool = False
        self.shared: KeyIndex = KeyIndex(True)
        self.private: KeyIndex = KeyIndex(False)
        self.first_hit: i64 = 0
        """Position of the first block that the last prefix hit needs."""
        self.hits: list[Block] = []
        """Blocks of the last prefix hit, from ``first_hit`` on."""
        self.num_hits: i64 = 0
        """Length of the last prefix hit, in blocks."""
        self.copies: list[Block] = []
        """Sources and targets of this step's block copies, held until the step is composed."""

    def blocks_for(self, tokens: i64) -> i64:
        """Return the number of blocks that hold ``tokens``."""
        return (tokens + self.size - 1) // self.size

    def cached(self, request: Request, units: i64) -> Block | None:
        """Return the cached block of the prefix of ``units`` match units; None: not cached."""
        if units <= request.num_keys:
            cached = self.shared.first.get(request.keys[request.first_key + units - 1])
            return None if cached is None else cached.block
        if request.preemptions == 0:  # only a preempted request looks up its private blocks
            return None
        private = self.private.first.get(request.index * MOST_UNITS + units)
        return None if private is None else private.block

    def add_key(self, request: Request, block: Block, tokens: i64) -> None:
        """Cache a block under the request's prefix of ``tokens``."""
        units = tokens // self.rules.unit
        if units <= request.num_keys:
            self.pool.add_key(block, self.shared, request.keys[request.first_key + units - 1])
        else:
            self.pool.add_key(block, self.private, request.index * MOST_UNITS + units)

    def cache_prefix(self, request: Request, block: Block, tokens: i64) -> None:
        """Cache a block under the request's prefix of ``tokens``, which ends inside the block."""
        units = tokens // self.rules.unit
        if units <= request.num_keys:
            self.pool.cache_prefix(block, self.shared, request.keys[request.first_key + units - 1], tokens)
        else:
            self.pool.cache_prefix(block, self.private, request.index * MOST_UNITS + units, tokens)

    def find(self, form: "Form", request: Request, most: i64, drops: bool) -> i64:
        """Find the longest prefix hit of a form's groups (vLLM's ``find_longest_cache_hit``), at most ``most`` tokens;
        return its tokens."""
        size = self.size
        alignment = self.rules.alignment
        scale = size // self.rules.unit
        num_units = request.num_tokens // self.rules.unit
        count: i64 = 0
        while (count + 1) * size <= most and (count + 1) * scale <= num_units:
            if not form.add_blocks(request, (count + 1) * scale):
                break
            count += 1
        hit = count * size
        if alignment < size and size % alignment == 0:
            end = min(count * scale + scale - 1, most // alignment)
            end = min(end, num_units)
            while end > count * scale:
                if form.add_blocks(request, end):
                    hit = end * alignment
                    break
                end -= 1
        if drops and hit > 0:
            hit -= min(alignment, size)
        hit -= hit % alignment
        form.trim(self.blocks_for(hit))
        return hit

    def skipped_tokens(self, computed: i64) -> i64:
        """Return the leading tokens that attention no longer needs after ``computed`` tokens."""
        return 0

    def most_blocks(self, tokens: i64) -> i64:
        """Return the most blocks that a request of ``tokens`` holds at a time."""
        return min(self.blocks_for(tokens), self.most)

    def needs(self, table: Table, computed: i64, end: i64, prefill_end: i64, *, is_hit: bool, is_capped: bool) -> i64:
        """Count the free blocks that tokens up to ``end`` need (vLLM's ``get_num_blocks_to_allocate``). ``is_hit``:
        include idle blocks of the last prefix hit. ``is_capped``: at most ``most``, as the request frees passed blocks.
        """
        required = self.blocks_for(end)
        num_blocks = i64(len(table.blocks))
        if is_capped:
            required = min(required, self.most)
        if table.num_cached != NONE:
            return max(required - num_blocks, 0)
        skipped = self.skipped_tokens(computed) // self.size
        hits = self.num_hits if is_hit else 0
        needed = max(required - max(skipped, hits + num_blocks), 0)
        if hits > 0:
            needed += self.count_idle(max(0, skipped - num_blocks))
            if computed % self.size != 0:
                needed += 1
        return needed

    def count_idle(self, first: i64) -> i64:
        """Count the idle blocks of the last prefix hit from position ``first`` on: no request holds them."""
        idle: i64 = 0
        for number in range(max(first - self.first_hit, 0), i64(len(self.hits))):
            if self.hits[number].references == 0:
                idle += 1
        return idle

    def adopt(self, table: Table, computed: i64) -> None:
        """Give a request that begins with ``computed`` tokens the blocks of the last prefix hit."""
        skipped = self.skipped_tokens(computed) // self.size
        count = self.num_hits
        first = max(skipped, min(self.first_hit, count))
        table.blocks = [self.pool.null] * first
        for position in range(first, count):
            block = self.hits[position - self.first_hit]
            self.pool.touch(block)
            table.blocks.append(block)
        table.num_cached = i64(len(table.blocks))
        if count > skipped and computed % self.size != 0:
            table.num_cached = computed // self.size
            table.partial = table.num_cached
            table.source = self.hits[-1]

    def grow(self, table: Table, end: i64) -> None:
        """Allocate blocks for tokens up to ``end``; the caller has checked that they are free."""
        if table.partial != NONE:
            self.copy_partial(table, self.pool.allocate())
        required = self.blocks_for(end)
        while i64(len(table.blocks)) < required:
            table.blocks.append(self.pool.allocate())

    def copy_partial(self, table: Table, copy: Block) -> None:
        """Replace the shared block in which the prefix hit ends by ``copy`` (copy on write); both blocks stay held
        until the step is composed."""
        source = table.source
        assert source is not None
        table.blocks[table.partial] = copy
        table.partial = NONE
        self.copies.append(source)
        self.copies.append(copy)
        self.pool.touch(copy)

    def free_skipped(self, table: Table, computed: i64) -> None:
        """Free the blocks that attention no longer needs (vLLM's ``remove_skipped_blocks``)."""
        skipped = self.skipped_tokens(computed)
        if skipped > 0:
            end = min(skipped // self.size, i64(len(table.blocks)))
            first = end
            while first > 0 and table.blocks[first - 1] is not self.pool.null:
                first -= 1
            self.pool.free_range(table.blocks, first, end)

    def cache_blocks(self, table: Table, request: Request, tokens: i64) -> None:
        """Cache the blocks filled by ``tokens`` that are worth caching."""
        self.cache_full_blocks(table, request, tokens)
        if self.size != self.rules.unit:
            self._cache_partial_block(table, request, tokens)

    def cache_full_blocks(self, table: Table, request: Request, tokens: i64) -> None:
        done = max(table.num_cached, 0)
        full = tokens // self.size
        if done >= full:
            return
        for position in range(done, full):
            block = table.blocks[position]
            if block is not self.pool.null and self.is_worth(request, position):
                self.pool.forget(block)  # drop the key of a prefix that ended inside the block
                self.add_key(request, block, (position + 1) * self.size)
                block.tokens = (position + 1) * self.size
        table.num_cached = full

    def is_worth(self, request: Request, position: i64) -> bool:
        """Return whether a full block is worth caching: a later request can continue after it."""
        return True

    def _cache_partial_block(self, table: Table, request: Request, tokens: i64) -> None:
        """Cache the block in which the prompt ends, to the match unit."""
        unit = self.rules.unit
        end = (request.prompt_tokens if self.drops_last else request.prompt_tokens - 1) // unit * unit
        position = end // self.size
        if 0 < end <= tokens and end % self.size != 0 and position < i64(len(table.blocks)):
            self.cache_prefix(request, table.blocks[position], end)

    def is_before_end(self, request: Request, position: i64, needed: i64, shift: i64) -> bool:
        """Return whether a block is among the ``needed`` blocks before a position where a later request can continue:
        the end of the prompt, if the request repeats or extends it, or the end of a shared prefix."""
        tokens = request.prompt_tokens
        block = self.rules.block_size
        if not self.rules.drops:
            if self._is_near(tokens - 1, position, needed, shift):
                return True
        elif self._is_near(max((tokens - 1) // block * block - block, 0), position, needed, shift) or self._is_near(
            max(tokens // block * block - block, 0), position, needed, shift
        ):
            return True
        return request.shared_tokens > 0 and self._is_near(request.shared_tokens, position, needed, shift)

    def _is_near(self, boundary: i64, position: i64, needed: i64, shift: i64) -> bool:
        end = boundary // self.rules.alignment * self.rules.alignment // self.size + shift
        return end - needed <= position < end


class Form:
    """Equal KV cache groups, which share a prefix lookup (vLLM's attention groups).

    ``margin``: extra tokens of a lookup whose prefix hit drops its last block.
    """

    def __init__(self, groups: list[Group], margin: i64) -> None:
        self.groups: list[Group] = groups
        self.first: Group = groups[0]
        self.margin: i64 = margin
        self.drops_last: bool = False
        for group in groups:
            if group.drops_last:
                self.drops_last = True
        self.tokens: i64 = 0
        """Length of the last prefix hit, in tokens."""
        self.is_looked_up: bool = False
        self.has_dropped: bool = False

    def clear(self) -> None:
        """Reset the last prefix hit."""
        for group in self.groups:
            group.first_hit = 0
            group.num_hits = 0
            group.hits.clear()

    def find(self, request: Request, most: i64, drops: bool) -> None:
        """Find the longest prefix hit of at most ``most`` tokens."""
        self.clear()
        self.tokens = self.first.find(self, request, most, drops)

    def add_blocks(self, request: Request, units: i64) -> bool:
        """Add the cached blocks of the prefix of ``units`` match units to the hit; False: a group has not cached it."""
        for added, group in enumerate(self.groups):
            block = group.cached(request, units)
            if block is None:
                for number in range(added):
                    self.groups[number].hits.pop()
                return False
            group.hits.append(block)
        return True

    def trim(self, blocks: i64) -> None:
        """Trim the prefix hit to ``blocks`` blocks."""
        for group in self.groups:
            group.num_hits = blocks
            del group.hits[max(blocks - group.first_hit, 0) :]

    def begin_at(self, first: i64) -> None:
        """Set the position of the first block of the prefix hit."""
        for group in self.groups:
            group.first_hit = first


class WindowGroup(Group):
    """KV cache group of a sliding window of ``span`` tokens: a prefix hit needs the blocks of its last window."""

    span: i64 = 0

    def find(self, form: Form, request: Request, most: i64, drops: bool) -> i64:
        size = self.size
        alignment = self.rules.alignment
        scale = size // self.rules.unit
        dropped: i64 = 1 if drops else 0
        needed = max((self.span - 1 + size - 1) // size + dropped, 1)
        run: i64 = 0
        position = most // size - 1
        while position >= 0 and run < needed:
            is_end = run > 0 or (position + 1 - dropped) * size % alignment == 0
            if not form.add_blocks(request, (position + 1) * scale):
                run = 0
                form.clear()
            elif is_end:
                run += 1
            else:
                form.clear()
            position -= 1
        form.begin_at(position + 1)
        for group in form.groups:
            group.hits.reverse()
        count = position + 1 + run
        if run < needed:
            count = self._aligned(count)
        if drops and count > 0:
            count = self._aligned(count - 1)
        form.trim(count)
        return count * size

    def _aligned(self, blocks: i64) -> i64:
        while blocks * self.size % self.rules.alignment != 0:
            blocks -= 1
        return blocks

    def skipped_tokens(self, computed: i64) -> i64:
        return max(0, computed - self.span + 1)

    def cache_blocks(self, table: Table, request: Request, tokens: i64) -> None:
        self.cache_full_blocks(table, request, tokens)

    def is_worth(self, request: Request, position: i64) -> bool:
        size = self.size
        retain = self.rules.retain
        if self.rules.alignment % size != 0:
            return True
        shift: i64 = 1 if self.drops_last else 0
        needed = (self.span - 1 + size - 1) // size + shift
        if retain != 0:
            period = (self.rules.alignment if retain == NONE else retain) // size
            if needed >= period:
                return True
            if position >= shift and (position - shift) % period >= period - needed:
                return True
            if retain == NONE:
                return False
        return self.is_before_end(request, position, needed, shift)


class ChunkGroup(Group):
    """KV cache group of chunked local attention: a prefix hit needs the blocks of its last chunk of ``span`` tokens."""

    span: i64 = 0

    def find(self, form: Form, request: Request, most: i64, drops: bool) -> i64:
        scale = self.size // self.rules.unit
        count = self.skipped_tokens(most) // self.size
        form.begin_at(count)
        while (count + 1) * self.size <= most and form.add_blocks(request, (count + 1) * scale):
            count += 1
        form.trim(count)
        return count * self.size

    def skipped_tokens(self, computed: i64) -> i64:
        return computed // self.span * self.span

    def cache_blocks(self, table: Table, request: Request, tokens: i64) -> None:
        self.cache_full_blocks(table, request, tokens)
