"""KV cache group of recurrent layers (Mamba), vLLM's ``align`` mode: a block holds a state, not tokens.

A request updates one state in place. A prefix hit needs the state at its end, so it can end only where a scheduler step
ended, or where the kernel stores a state inside a step (``mamba2``). mypyc compiles this module.
"""

from mypy_extensions import i64

from sim.vllm.blocks import NONE, Block, Table
from sim.vllm.groups import MOST_UNITS, Form, Group
from sim.vllm.request import Request


class StateGroup(Group):
    """KV cache group of recurrent states. ``stores_inside``: the kernel also stores a state inside a scheduler step."""

    stores_inside: bool = False

    def find(self, form: Form, request: Request, most: i64, drops: bool) -> i64:
        unit = self.rules.unit
        alignment = self.rules.alignment
        step = self.size
        if alignment < step and step % alignment == 0:
            step = alignment
        end = min(most // step, request.num_tokens // unit * unit // step)
        while end > 0:
            tokens = end * step
            if tokens % alignment == 0 and form.add_blocks(request, tokens // unit):
                form.begin_at(self.blocks_for(tokens) - 1)
                form.trim(self.blocks_for(tokens))
                return tokens
            end -= 1
        return 0

    def skipped_tokens(self, computed: i64) -> i64:
        return computed - 1

    def most_blocks(self, tokens: i64) -> i64:
        blocks = min(self.blocks_for(tokens), 2)
        if self.rules.partial_hits:
            blocks += 1
        return blocks + 1 if self.stores_inside else blocks

    def needs(self, table: Table, computed: i64, end: i64, prefill_end: i64, *, is_hit: bool, is_capped: bool) -> i64:
        hits = self.num_hits if is_hit else 0
        if hits > 0 and is_new_state(self.hits[-1]):
            return self.pool.num_blocks + 2
        needed = self.blocks_for(end) - hits - i64(len(table.blocks))
        most: i64 = 1
        if (hits > 0 and computed % self.size != 0) or table.partial != NONE:
            needed = max(needed, 0) + 1
            most += 1
        checkpoint = self._checkpoint(table, computed, end, prefill_end)
        if checkpoint != NONE:
            most += 1
        if not is_capped:
            table.checkpoint = checkpoint
            table.checkpoint_position = self.blocks_for(end) - 2
        if needed > 0:
            needed = min(needed, most)
        return needed + self.count_idle(0) if hits > 0 else needed

    def _checkpoint(self, table: Table, start: i64, end: i64, prefill_end: i64) -> i64:
        """Return the tokens of the state that the kernel stores inside a step from ``start`` to ``end``, or NONE."""
        tokens = state_end(end, self.rules.alignment, self.rules.drops)
        position = self.blocks_for(end) - 2
        if not self.stores_inside or end < prefill_end or tokens <= 0 or position < 0:
            return NONE
        if position < i64(len(table.blocks)) and table.blocks[position] is not self.pool.null:
            return NONE
        return tokens if can_store_inside(start, end, tokens, self.rules.unit, self.size) else NONE

    def grow(self, table: Table, end: i64) -> None:
        blocks = table.blocks
        before = i64(len(blocks))
        required = self.blocks_for(end)
        inside: i64 = 1 if table.checkpoint != NONE else 0
        was_allocated = table.allocated
        table.allocated = True
        if required <= before and table.partial == NONE and inside == 0:
            return
        if before > 0:
            table.last_state = before - 1
        while i64(len(blocks)) < required - 1 - inside:
            blocks.append(self.pool.null)
        copy = self.pool.allocate() if table.partial != NONE else None
        while i64(len(blocks)) < required:
            blocks.append(self.pool.allocate())
        if copy is None:
            return
        if was_allocated:
            self._cache_copy(table, copy)
        else:
            self.copy_partial(table, copy)

    def _cache_copy(self, table: Table, copy: Block) -> None:
        """Move the prefix cache entry to ``copy``, as the request goes on updating the state in its own block."""
        source = table.source
        assert source is not None
        table.partial = NONE
        while source.first_key is not None:
            index = source.first_key.index
            key = source.first_key.key
            self.pool.forget_first_key(source)
            self.pool.add_key(copy, index, key)
        copy.tokens = source.tokens
        self.copies.append(source)
        self.copies.append(copy)
        self.pool.touch(source)
        mark_new_state(copy)

    def free_skipped(self, table: Table, computed: i64) -> None:
        skipped = self.skipped_tokens(computed)
        end = min(skipped // self.size, i64(len(table.blocks)))
        if skipped > 0 and table.retired < end:
            self.pool.free_range(table.blocks, table.retired, end)
            table.retired = end
        last = table.last_state
        if last != NONE and last < self.blocks_for(computed) - 1:
            self.pool.free_range(table.blocks, last, last + 1)

    def cache_blocks(self, table: Table, request: Request, tokens: i64) -> None:
        before = max(table.num_cached, 0)
        self.cache_full_blocks(table, request, tokens)
        full = min(table.num_cached, i64(len(table.blocks)))
        self._cache_state(table, request, tokens)
        for position in range(before, full):
            mark_new_state(table.blocks[position])

    def is_worth(self, request: Request, position: i64) -> bool:
        retain = self.rules.retain
        if retain == NONE or 0 < retain <= self.size:
            return True
        if retain > 0 and (position + 1) % (retain // self.size) == 0:
            return True
        return self.is_before_end(request, position, 1, 0)

    def _cache_state(self, table: Table, request: Request, tokens: i64) -> None:
        """Cache the state stored inside the step, or the prompt's last state at the end of the step."""
        if table.checkpoint != NONE:
            self._cache_checkpoint(table, request)
            return
        unit = self.rules.unit
        if tokens <= 0 or tokens % unit != 0 or tokens != state_end(request.prompt_tokens, unit, self.rules.drops):
            return
        position = self.blocks_for(tokens) - 1
        if position >= i64(len(table.blocks)) or table.blocks[position] is self.pool.null:
            return
        self._insert_state(request, table.blocks[position], tokens)
        if tokens % self.size != 0:
            table.partial = position
            table.num_cached = position
            table.source = table.blocks[position]

    def _cache_checkpoint(self, table: Table, request: Request) -> None:
        end = table.checkpoint
        block = table.blocks[table.checkpoint_position]
        if not self._is_end_worth(request, end):
            self.pool.forget(block)
        elif block.first_key is None or block.tokens != end:
            self.pool.forget(block)
            self._insert_state(request, block, end)

    def _is_end_worth(self, request: Request, end: i64) -> bool:
        if end == state_end(request.prompt_tokens, self.rules.alignment, self.rules.drops):
            return True
        if end == request.shared_tokens:
            return True
        if end % self.size != 0:
            return False
        retain = self.rules.retain
        return retain == NONE or (retain > 0 and end % max(retain, self.size) == 0)

    def _insert_state(self, request: Request, block: Block, end: i64) -> None:
        if block is self.pool.null:
            return
        self.cache_prefix(request, block, end)
        units = end // self.rules.unit
        if units <= request.num_keys:
            self.shared.new_states.add(request.keys[request.first_key + units - 1])
        else:
            self.private.new_states.add(request.index * MOST_UNITS + units)


def mark_new_state(block: Block) -> None:
    """Mark a block's state as cached in this scheduler step."""
    cached = block.first_key
    if cached is not None:
        cached.index.new_states.add(cached.key)


def is_new_state(block: Block) -> bool:
    """Return whether a block's state was cached in this scheduler step."""
    cached = block.first_key
    return cached is not None and cached.key in cached.index.new_states


def state_end(tokens: i64, unit: i64, drops_last: bool) -> i64:
    """Return the longest useful prefix hit of a prompt of ``tokens``, in multiples of ``unit``."""
    if drops_last:
        return max(tokens // unit * unit - unit, 0)
    return (tokens - 1) // unit * unit


def can_store_inside(start: i64, end: i64, tokens: i64, unit: i64, size: i64) -> bool:
    """Return whether a kernel can store the state after ``tokens`` inside a step from ``start`` to ``end``."""
    return (
        start % unit == 0
        and (end - 1) // size - 1 > (start - 1) // size
        and start + unit <= tokens
        and start < tokens < end
    )
