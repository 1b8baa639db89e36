"""KV cache group of recurrent layers (Mamba), vLLM's ``align`` mode: a block holds a state, not tokens.

A request updates one state. A prefix hit needs the state at its end, so it can end only where a scheduler step ended,
or where the kernel stores a state inside a step (``mamba2``).
"""

from collections.abc import Sequence

from sim.vllm.kvgroups import KvGroup, KvLayout
from tests.sim.oracles.readable.groupcache import NULL, Cached, Group, Progress, Rows, Table, reachable
from tests.sim.oracles.readable.pool import BlockPool
from tests.sim.oracles.readable.rules import blocks_for


class StateGroup(Group):
    """KV cache group of recurrent states."""

    def __init__(
        self, spec: KvGroup, position: int, layout: KvLayout, pool: BlockPool, tokens_of: dict[int, int]
    ) -> None:
        super().__init__(spec, position, layout, pool, tokens_of)
        self.cached_now = set[int | None]()
        """Keys of the states cached in this step: no other request of this step may read them."""

    def find(self, cached: Cached, most: int, hashed: int, *, drops_last: bool) -> tuple[Rows, int]:
        step = self.alignment if self.ends_inside else self.size
        for end in range(min(most // step, hashed * self.unit // step), 0, -1):
            tokens = end * step
            row = cached(tokens // self.unit)
            if row is not None and tokens % self.alignment == 0:
                return [*([[]] * (blocks_for(tokens, self.size) - 1)), row], tokens
        return [], 0

    def skipped_tokens(self, computed: int) -> int:
        return computed - 1

    def needs(
        self, table: Table, hits: Sequence[int], computed: int, end: int, prefill_end: int, *, capped: bool = False
    ) -> int:
        if hits and self.pool.key_of(hits[-1]) in self.cached_now:
            return self.pool.num_gpu_blocks + 1
        new = blocks_for(end, self.size) - len(hits) - len(table.blocks)
        copied = (bool(hits) and computed % self.size != 0) or table.partial is not None
        if copied:
            new = max(new, 0) + 1
        checkpoint = self._checkpoint(table, computed, end, prefill_end)
        if not capped:
            table.checkpoint = checkpoint
        return (min(new, 1 + copied + (checkpoint is not None)) if new > 0 else new) + self.count_idle(hits)

    def most_blocks(self, tokens: int) -> int:
        return min(blocks_for(tokens, self.size), 2) + self.layout.partial_hits + (self.spec.kind == "mamba2")

    def _checkpoint(self, table: Table, start: int, end: int, prefill_end: int) -> tuple[int, int] | None:
        """Tokens and position of the state that the kernel stores on its way from ``start`` to ``end``; None: none."""
        tokens = state_end(end, self.alignment, bool(self.layout.dropping))
        position = blocks_for(end, self.size) - 2
        if self.spec.kind != "mamba2" or end < prefill_end or tokens <= 0 or position < 0:
            return None
        is_free = position >= len(table.blocks) or table.blocks[position] == NULL
        return (tokens, position) if is_free and stores_inside(start, end, tokens, self.unit, self.size) else None

    def grow(self, table: Table, end: int) -> None:
        blocks, before, required = table.blocks, len(table.blocks), blocks_for(end, self.size)
        inside = table.checkpoint is not None
        if required <= before and table.partial is None and not inside:
            table.allocated = True
            return
        if before:
            table.last_state = before - 1
        blocks += [NULL] * (required - 1 - inside - before)
        allocated = self.pool.allocate(max(required - len(blocks), 0) + (table.partial is not None))
        if table.partial is not None:
            copy = allocated.pop(0)
            if table.allocated:
                self._keep_copy(table, copy)
            else:
                self.copy_partial(table, copy)
        blocks += allocated
        table.allocated = True

    def _keep_copy(self, table: Table, copy: int) -> None:
        """Move the prefix cache entry to ``copy``, as the request goes on updating the state."""
        assert table.partial is not None
        _, source = table.partial
        table.partial = None
        for key in self.pool.forget(source):
            self.pool.insert_also(copy, key)
        self.tokens_of[copy] = self.tokens_of[source]
        self.copies.append((source, copy))
        self.pool.touch([source])
        if (key_now := self.pool.key_of(copy)) is not None:
            self.cached_now.add(key_now)

    def free_skipped(self, table: Table, computed: int) -> None:
        super().free_skipped(table, computed)
        last = table.last_state
        if last is not None and last < blocks_for(computed, self.size) - 1 and table.blocks[last] != NULL:
            self.pool.free_blocks([table.blocks[last]])
            table.blocks[last] = NULL

    def free_range(self, table: Table, end: int) -> None:
        if table.retired >= end:
            return
        positions = [position for position in range(table.retired, end) if table.blocks[position] != NULL]
        self.pool.free_blocks([table.blocks[position] for position in positions])
        for position in positions:
            table.blocks[position] = NULL
        table.retired = end

    def cache_blocks(self, table: Table, progress: Progress, tokens: int) -> None:
        before = table.num_cached or 0
        self.cache_full_blocks(table, progress, tokens)
        full = table.num_cached or 0
        self._cache_state(table, progress, tokens)
        for block in table.blocks[before:full]:
            if block != NULL and (key := self.pool.key_of(block)) is not None:
                self.cached_now.add(key)

    def wanted(self, done: int, full: int, progress: Progress) -> set[int] | None:
        """Places of the states at ends that a later request can hit."""
        retain = self.layout.retain
        if retain is None or 0 < retain <= self.size:
            return None
        period = retain // self.size
        result = {position for position in range(done, full) if (position + 1) % period == 0} if period else set()
        ends = (end // self.alignment * self.alignment // self.size - 1 for end in reachable(progress, self.layout))
        return result | {position for position in ends if done <= position < full}

    def _cache_state(self, table: Table, progress: Progress, tokens: int) -> None:
        """Cache the state that was stored inside the step, or at its end if the prompt's last one is there."""
        drops_last = bool(self.layout.dropping)
        if table.checkpoint is not None:
            end, position = table.checkpoint
            block = table.blocks[position]
            if not self._is_worth(end, progress, drops_last=drops_last):
                self.pool.forget(block)
            elif self.pool.key_of(block) is None or self.tokens_of[block] != end:
                self.pool.forget(block)
                self._insert_state(block, progress, end)
            return
        if tokens <= 0 or tokens % self.unit or tokens != state_end(progress.prompt_tokens, self.unit, drops_last):
            return
        position = blocks_for(tokens, self.size) - 1
        if position >= len(table.blocks) or table.blocks[position] == NULL:
            return
        self._insert_state(table.blocks[position], progress, tokens)
        if tokens % self.size:
            table.partial = position, table.blocks[position]
            table.num_cached = position

    def _is_worth(self, end: int, progress: Progress, *, drops_last: bool) -> bool:
        if end == state_end(progress.prompt_tokens, self.alignment, drops_last) or end == progress.shared_tokens:
            return True
        if end % self.size:
            return False
        retain = self.layout.retain
        return retain is None or (retain > 0 and end % max(retain, self.size) == 0)

    def _insert_state(self, block: int, progress: Progress, end: int) -> None:
        if block == NULL:
            return
        key = self.key(progress.hashes, end)
        self.insert_partial(block, key, end)
        self.cached_now.add(key)


def state_end(tokens: int, unit: int, drops_last: bool) -> int:
    """Return the longest useful prefix hit of a prompt of ``tokens``, in multiples of ``unit``."""
    end = (tokens if drops_last else tokens - 1) // unit * unit
    return max(end - unit if drops_last else end, 0)


def stores_inside(start: int, end: int, tokens: int, unit: int, size: int) -> bool:
    """Return whether a kernel computing ``start`` to ``end`` can store the state after ``tokens`` on its way."""
    return (
        start % unit == 0
        and (end - 1) // size - 1 > (start - 1) // size
        and start + unit <= tokens
        and start < tokens < end
    )
