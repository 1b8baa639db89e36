"""Rules of a KV cache group: prefix lookup, block allocation, freeing of blocks behind the window, caching.

Follows vLLM 0.32's ``single_type_kv_cache_manager``, function by function. ``Group`` is full attention; window, chunk
and state groups override which blocks a prefix hit needs, which blocks can be freed, and which are worth caching.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sim.vllm.kvgroups import KvGroup, KvLayout
from tests.sim.oracles.readable.pool import BlockPool
from tests.sim.oracles.readable.rules import blocks_for

NULL = 0
"""The null block: it replaces blocks that attention does not need."""
Rows = list[list[int]]
"""Blocks found, by position in the prompt and then by group."""
Cached = Callable[[int], list[int] | None]
"""Block of each group that ends at so many match units; None: a group has none."""


@dataclass(slots=True)
class Table:
    """Block table of a request in one KV group."""

    blocks: list[int] = field(default_factory=list)
    num_cached: int | None = None
    """Leading blocks that need no caching any more; None: nothing was cached or hit."""
    partial: tuple[int, int] | None = None
    """Place and block of a hit that ends inside it: the block is copied before it is written."""
    allocated: bool = False
    last_state: int | None = None
    retired: int = 0
    checkpoint: tuple[int, int] | None = None
    """Tokens at which this step stores a state on its way, and the position of its block."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a request."""

    hashes: Sequence[int]
    prompt_tokens: int
    shared_tokens: int


class Group:
    """KV cache group of full attention: a prefix hit is a run of blocks from the start of the prompt."""

    def __init__(
        self, spec: KvGroup, position: int, layout: KvLayout, pool: BlockPool, tokens_of: dict[int, int]
    ) -> None:
        self.spec, self.layout, self.pool = spec, layout, pool
        self.position, self.size = position, spec.block_size
        self.unit, self.alignment = layout.match_unit, layout.alignment
        self.drops_last = position in layout.dropping
        self.most: int | None = None
        """Blocks that a request holds at most; None: all of its tokens'."""
        self.copies: list[tuple[int, int]] = []
        """Source and copy of this step's copied blocks, held until the step is composed."""
        self.tokens_of = tokens_of
        """By block: tokens up to the end of its first key."""

    def find(self, cached: Cached, most: int, hashed: int, *, drops_last: bool) -> tuple[Rows, int]:
        """Blocks and tokens of the longest hit of at most ``most`` tokens, whose hashes are ``known`` match units.

        A hit is a run from the prompt's beginning.
        """
        size, alignment, scale = self.size, self.alignment, self.size // self.unit
        rows: Rows = []
        while (len(rows) + 1) * size <= most and (len(rows) + 1) * scale <= hashed:
            row = cached((len(rows) + 1) * scale)
            if row is None:
                break
            rows.append(row)
        hit = len(rows) * size
        if self.ends_inside:
            last = min(len(rows) * scale + scale - 1, most // alignment, hashed)
            for end in range(last, len(rows) * scale, -1):
                if (row := cached(end)) is not None:
                    rows.append(row)
                    hit = end * alignment
                    break
        if drops_last and hit > 0:
            hit -= min(alignment, size)
        hit -= hit % alignment
        del rows[blocks_for(hit, size) :]
        return rows, hit

    @property
    def ends_inside(self) -> bool:
        """True if a hit may end inside a block of the group."""
        return self.alignment < self.size and self.size % self.alignment == 0

    def key(self, hashes: Sequence[int], tokens: int) -> int:
        return hashes[tokens // self.unit - 1] * len(self.layout.groups) + self.position

    def skipped_tokens(self, computed: int) -> int:
        """Return the leading tokens that attention no longer needs after ``computed`` tokens."""
        return 0

    def most_blocks(self, tokens: int) -> int:
        """Return the most blocks that a request of ``tokens`` holds at a time."""
        blocks = blocks_for(tokens, self.size)
        return blocks if self.most is None else min(blocks, self.most)

    def limit(self, in_flight: int, max_model_len: int) -> None:
        """Note the blocks that a request holds at most, given the tokens of it in unfinished steps."""

    def count_idle(self, blocks: Sequence[int]) -> int:
        return self.pool.count_idle(block for block in blocks if block != NULL)

    def needs(
        self, table: Table, hits: Sequence[int], computed: int, end: int, prefill_end: int, *, capped: bool = False
    ) -> int:
        """Free blocks used up by tokens up to ``end``. ``capped``: as for a request that frees blocks on its way."""
        required, held = blocks_for(end, self.size), len(table.blocks)
        if capped and self.most is not None:
            required = min(required, self.most)
        if table.num_cached is not None:
            return max(required - held, 0)
        skipped = self.skipped_tokens(computed) // self.size
        new = max(required - max(skipped, len(hits) + held), 0)
        copied = bool(hits) and computed % self.size != 0
        return new + self.count_idle(hits[max(0, skipped - held) :]) + copied

    def adopt(self, table: Table, hits: list[int], computed: int) -> None:
        """Hold ``hits`` for a request that begins with ``computed`` tokens."""
        skipped = self.skipped_tokens(computed) // self.size
        hits = hits[skipped:]
        self.pool.touch(block for block in hits if block != NULL)
        table.blocks += [NULL] * skipped + hits
        table.num_cached = len(table.blocks)
        if hits and computed % self.size:
            table.num_cached = computed // self.size
            table.partial = table.num_cached, hits[-1]

    def grow(self, table: Table, end: int) -> None:
        """Allocate blocks for tokens up to ``end``; the caller has checked that they are free."""
        if table.partial is not None:
            self.copy_partial(table, self.pool.allocate(1)[0])
        lacking = blocks_for(end, self.size) - len(table.blocks)
        if lacking > 0:
            table.blocks += self.pool.allocate(lacking)

    def copy_partial(self, table: Table, copy: int) -> None:
        """Replace the shared block in which the prefix hit ends by ``copy``; both are held until the step is
        composed."""
        assert table.partial is not None
        position, source = table.partial
        table.partial = None
        table.blocks[position] = copy
        self.copies.append((source, copy))
        self.pool.touch([copy])

    def free_skipped(self, table: Table, computed: int) -> None:
        """Free the blocks that attention needs no more; the null block replaces them."""
        skipped = self.skipped_tokens(computed)
        if skipped > 0:
            self.free_range(table, min(skipped // self.size, len(table.blocks)))

    def free_range(self, table: Table, end: int) -> None:
        first = end
        while first > 0 and table.blocks[first - 1] != NULL:
            first -= 1
        if first < end:
            self.pool.free_blocks(table.blocks[first:end])
            table.blocks[first:end] = [NULL] * (end - first)

    def cache_blocks(self, table: Table, progress: Progress, tokens: int) -> None:
        """Cache the blocks filled by ``tokens`` that are worth caching."""
        self.cache_full_blocks(table, progress, tokens)
        if self.size != self.unit:
            self._cache_partial_block(table, progress, tokens)

    def cache_full_blocks(self, table: Table, progress: Progress, tokens: int) -> None:
        done, full = table.num_cached or 0, tokens // self.size
        if done >= full:
            return
        wanted = self.wanted(done, full, progress)
        positions = [
            position
            for position in range(done, full)
            if table.blocks[position] != NULL and (wanted is None or position in wanted)
        ]
        blocks = [table.blocks[position] for position in positions]
        self.pool.insert(blocks, [self.key(progress.hashes, (position + 1) * self.size) for position in positions])
        self.tokens_of.update(
            (block, (position + 1) * self.size) for block, position in zip(blocks, positions, strict=True)
        )
        table.num_cached = full

    def wanted(self, done: int, full: int, progress: Progress) -> set[int] | None:
        """Positions from ``done`` to ``full`` that are cached; None: all."""
        return None

    def _cache_partial_block(self, table: Table, progress: Progress, tokens: int) -> None:
        """Cache the block in which the prompt ends, to the match unit."""
        limit = progress.prompt_tokens if self.drops_last else progress.prompt_tokens - 1
        end = limit // self.unit * self.unit
        position = end // self.size
        if 0 < end <= tokens and end % self.size and position < len(table.blocks):
            self.insert_partial(table.blocks[position], self.key(progress.hashes, end), end)

    def insert_partial(self, block: int, key: int, tokens: int) -> None:
        """Cache ``block``, if it is not the null block, under the prefix of ``tokens`` that ends inside it."""
        if block == NULL:
            return
        keys = self.pool.keys_of(block)
        if keys and key not in keys and self.tokens_of[block] < tokens:
            self.pool.forget(block)
            keys = []
        self.pool.insert_also(block, key)
        if not keys:
            self.tokens_of[block] = tokens

    def free(self, table: Table) -> None:
        self.pool.free_blocks([block for block in table.blocks if block != NULL])


class WindowGroup(Group):
    """KV cache group of a sliding window: a prefix hit needs the blocks of its last window."""

    def find(self, cached: Cached, most: int, hashed: int, *, drops_last: bool) -> tuple[Rows, int]:
        size, scale = self.size, self.size // self.unit
        needed = blocks_for(self.spec.span - 1, size) + drops_last
        count, run = most // size, 0
        rows: Rows = [[]] * count
        for position in range(count - 1, -1, -1):
            row = cached((position + 1) * scale)
            if row is None:
                run = 0
                continue
            if run == 0 and (position + (not drops_last)) * size % self.alignment:
                continue
            rows[position] = row
            run += 1
            if run >= needed:
                del rows[position + run :]
                break
        else:
            del rows[run:]
            self._align(rows)
        if drops_last and rows:
            rows.pop()
            self._align(rows)
        return rows, len(rows) * size

    def limit(self, in_flight: int, max_model_len: int) -> None:
        # One more: the window may begin inside a block.
        self.most = blocks_for(min(self.spec.span - 1 + in_flight, max_model_len), self.size) + 1

    def _align(self, rows: Rows) -> None:
        while len(rows) * self.size % self.alignment:
            rows.pop()

    def skipped_tokens(self, computed: int) -> int:
        return max(0, computed - self.spec.span + 1)

    def cache_blocks(self, table: Table, progress: Progress, tokens: int) -> None:
        self.cache_full_blocks(table, progress, tokens)

    def wanted(self, done: int, full: int, progress: Progress) -> set[int] | None:
        """Places within a window before the ends that a later request can hit."""
        if self.alignment % self.size:
            return None
        needed, shift = blocks_for(self.spec.span - 1, self.size) + self.drops_last, int(self.drops_last)
        retain, retained = self.layout.retain, set[int]()
        if retain != 0:
            period = (self.alignment if retain is None else retain) // self.size
            if needed >= period:
                return None
            retained = {at for at in range(max(done, shift), full) if (at - shift) % period >= period - needed}
        if retain is not None:
            for boundary in reachable(progress, self.layout):
                end = boundary // self.alignment * self.alignment // self.size + shift
                retained.update(range(max(done, end - needed), min(full, end)))
        return retained


class ChunkGroup(Group):
    """KV cache group of chunked local attention: a prefix hit needs the blocks of its last chunk."""

    def find(self, cached: Cached, most: int, hashed: int, *, drops_last: bool) -> tuple[Rows, int]:
        scale = self.size // self.unit
        rows: Rows = [[]] * (self.skipped_tokens(most) // self.size)
        while (len(rows) + 1) * self.size <= most and (row := cached((len(rows) + 1) * scale)) is not None:
            rows.append(row)
        return rows, len(rows) * self.size

    def limit(self, in_flight: int, max_model_len: int) -> None:
        self.most = blocks_for(min(self.spec.span + in_flight, max_model_len), self.size)

    def skipped_tokens(self, computed: int) -> int:
        return computed // self.spec.span * self.spec.span

    def cache_blocks(self, table: Table, progress: Progress, tokens: int) -> None:
        self.cache_full_blocks(table, progress, tokens)


def reachable(progress: Progress, layout: KvLayout) -> list[int]:
    """Tokens at which a request that repeats or continues the prompt can go on, and the end of a shared prefix."""
    tokens, block = progress.prompt_tokens, layout.block_size
    ends = [tokens - 1]
    if layout.dropping:
        ends = [max(end // block * block - block, 0) for end in (tokens - 1, tokens)]
    return [*ends, progress.shared_tokens] if progress.shared_tokens else ends
