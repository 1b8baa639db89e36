"""KV cache of several KV groups over one block pool: prefix lookup, allocation, freeing and caching.

Follows vLLM 0.32's ``kv_cache_coordinator`` and ``kv_cache_manager``. A prefix hit ends where all groups have the
blocks that they need, at a multiple of the layout's alignment. mypyc compiles this module.
"""

from mypy_extensions import i64

from measure.cache.hashtable import BoxedVec
from sim.vllm.blocks import NO_TABLES, BlockPool, Table
from sim.vllm.groups import Form, Group, HitRules
from sim.vllm.kvcache import KVCache
from sim.vllm.request import Request
from sim.vllm.states import can_store_inside, state_end


class ChunkLimits:
    """Limits of prefill chunks that store recurrent states. ``state_block``: their block size; 0: no states."""

    def __init__(self, state_block: i64, most_tokens: i64, *, stores_inside: bool) -> None:
        self.state_block: i64 = state_block
        self.most_tokens: i64 = most_tokens
        """Token budget of a scheduler step."""
        self.stores_inside: bool = stores_inside


class HybridCache(KVCache):
    """KV cache of several groups over one block pool. ``forms``: sets of equal groups, full attention first."""

    def __init__(
        self,
        pool: BlockPool,
        rules: HitRules,
        groups: list[Group],
        forms: list[Form],
        limits: ChunkLimits,
        *,
        max_model_len: i64,
        caching: bool,
    ) -> None:
        self.pool: BlockPool = pool
        self.rules: HitRules = rules
        self.groups: list[Group] = groups
        self.forms: list[Form] = forms
        self.limits: ChunkLimits = limits
        self.max_model_len: i64 = max_model_len
        self.caching: bool = caching
        self._spare: list[Table] = []
        """Empty block tables for the next request."""

    def fits(self, request: Request) -> bool:
        blocks: i64 = 0
        for group in self.groups:
            blocks += group.most_blocks(request.last_token - 1)
        return blocks <= self.pool.num_blocks

    def look_up(self, request: Request) -> i64:
        """Rule 6: prefix hit of all groups; the last token is always computed."""
        request.shared_tokens = 0
        for form in self.forms:
            form.clear()
        if not self.caching or request.hit_limit == 0:
            return 0
        if self.rules.is_alone:
            alone = self.forms[0]
            alone.find(request, request.num_tokens - 1, alone.drops_last)
            return alone.tokens
        return self._agree_on_hit(request)

    def count_hits(self, keys: BoxedVec) -> i64:
        tokens = i64(len(keys)) * self.rules.unit
        probe = Request("", tokens + 1, 1, keys, num_keys=len(keys))
        return self.look_up(probe) // self.rules.unit

    def _agree_on_hit(self, request: Request) -> i64:
        """Shorten the prefix hit, form after form, until all groups agree on its length."""
        forms = self.forms
        most = request.num_tokens - 1
        longest: i64 = 0
        for form in forms:
            form.is_looked_up = False
            form.has_dropped = False
        while True:
            tokens = most
            for form in forms:
                if form.first.sees_all and form.is_looked_up:
                    tokens = min(tokens, form.tokens)
                    continue
                drops = form.drops_last and not form.has_dropped
                form.find(request, self._most_tokens(form, request, tokens) if drops else tokens, drops)
                if drops:
                    form.has_dropped = True
                elif form.tokens < tokens:
                    for other in forms:
                        other.has_dropped = False
                tokens = form.tokens
                form.is_looked_up = True
                longest = max(longest, tokens)
            if tokens >= most:
                break
            most = tokens
            if len(forms) == 2 and forms[0].first.sees_all:
                break
        for form in forms:
            if form.first.sees_all:
                form.trim(min(form.first.num_hits, form.first.blocks_for(most)))
        request.shared_tokens = longest if longest > most else 0
        return most

    def _most_tokens(self, form: Form, request: Request, tokens: i64) -> i64:
        """Return the tokens to look up for a prefix hit of ``tokens`` after the last block is dropped."""
        if not form.drops_last or form.margin == 0:
            return tokens
        return min(tokens + form.margin, request.num_tokens // self.rules.unit * self.rules.unit)

    def admit(self, request: Request, hit_tokens: i64, tokens: i64) -> bool:
        """Rule 9: the complete prompt needs free blocks."""
        if not self._spare:
            self._spare = [Table() for _ in self.groups]
        tables = self._spare
        complete = min(request.num_tokens, self.max_model_len)
        if self._needs(request, tables, hit_tokens, complete, is_hit=True, is_capped=True) > self.pool.num_free:
            return False
        if (
            self._needs(request, tables, hit_tokens, hit_tokens + tokens, is_hit=True, is_capped=False)
            > self.pool.num_free
        ):
            return False
        self._spare = []
        request.tables = tables
        request.num_computed = hit_tokens
        is_hit = False
        for form in self.forms:
            is_hit = is_hit or form.first.num_hits > 0
        if is_hit:
            for number in range(i64(len(tables))):
                self.groups[number].adopt(tables[number], hit_tokens)
        self._grow(request, hit_tokens + tokens)
        return True

    def extend(self, request: Request, end: i64) -> bool:
        """Free the blocks that attention has passed, then allocate blocks for tokens up to ``end``."""
        tables = request.tables
        passed = max(0, request.num_computed - request.tokens_in_flight)
        for number in range(i64(len(tables))):
            self.groups[number].free_skipped(tables[number], passed)
        if self._needs(request, tables, request.num_computed, end, is_hit=False, is_capped=False) > self.pool.num_free:
            return False
        self._grow(request, end)
        return True

    def _needs(
        self, request: Request, tables: list[Table], computed: i64, end: i64, *, is_hit: bool, is_capped: bool
    ) -> i64:
        prefill_end: i64 = 0
        if self.rules.retain == 0:
            prefill_end = max(request.prompt_tokens, request.num_tokens - 1)
        blocks: i64 = 0
        for number in range(i64(len(tables))):
            blocks += self.groups[number].needs(
                tables[number], computed, end, prefill_end, is_hit=is_hit, is_capped=is_capped
            )
        return blocks

    def _grow(self, request: Request, end: i64) -> None:
        """Allocate free blocks for tokens up to ``end``, in every group."""
        for number in range(i64(len(request.tables))):
            self.groups[number].grow(request.tables[number], end)
        # Every step allocates again: attention may have passed a block.
        request.next_full = 0
        request.allocated_tokens = 0

    def cache_blocks(self, request: Request, end: i64) -> bool:
        """Rule 10: full blocks enter the prefix cache."""
        if self.caching:
            for number in range(i64(len(request.tables))):
                group = self.groups[number]
                group.cache_blocks(request.tables[number], request, self._cacheable(group, end))
        has_changed = self.pool.has_changed
        self.pool.has_changed = False
        return has_changed

    def _cacheable(self, group: Group, tokens: i64) -> i64:
        """Return the leading tokens that a prefix hit can reach."""
        if self.rules.is_alone or self.rules.partial_hits:
            return tokens
        complete = tokens // self.rules.block_size * self.rules.block_size
        return min(tokens, complete + group.size) if group.drops_last and complete > 0 else complete

    def free(self, request: Request) -> None:
        tables = request.tables
        for number in range(i64(len(tables))):
            self.pool.free_range(tables[number].blocks, 0, i64(len(tables[number].blocks)))
        request.tables = NO_TABLES
        request.allocated_tokens = 0
        request.next_full = 0

    def compute(self, request: Request, hit_tokens: i64) -> bool:
        """Compute step by step: states are stored and window blocks freed where a scheduler step ends."""
        at = hit_tokens
        is_admitted = False
        while at < request.last_token - 1:
            end = self._step_end(request, at)
            request.num_computed = at
            is_allocated = self.extend(request, end) if is_admitted else self.admit(request, at, end - at)
            if not is_allocated:
                return False
            is_admitted = True
            self.cache_blocks(request, min(end, request.num_tokens))
            at = end
            self.end_step()
            self.begin_step()
        return True

    def _step_end(self, request: Request, at: i64) -> i64:
        """Return the tokens computed after the next scheduler step of a request that runs alone."""
        if at < request.prompt_tokens:
            return at + self.clip(request, at, min(request.prompt_tokens - at, self.limits.most_tokens))
        # Between two match units decoding changes nothing; the last step frees the blocks behind the window.
        last = request.last_token - 1
        request.num_tokens = min((at // self.rules.unit + 1) * self.rules.unit, last if at == last - 1 else last - 1)
        return request.num_tokens

    def clip(self, request: Request, start: i64, tokens: i64) -> i64:
        """End a prefill chunk at a block boundary, before the last state worth caching, or at that state."""
        rules = self.rules
        size = self.limits.state_block
        prefill_end = max(request.prompt_tokens, request.num_tokens - 1)
        if size == 0 or start >= prefill_end:
            return tokens
        end = start + tokens
        stores_inside = False
        if self.limits.stores_inside and end >= prefill_end:
            state_tokens = state_end(prefill_end, rules.unit if rules.partial_hits else size, rules.drops)
            stores_inside = can_store_inside(start, end, state_tokens, rules.unit, size)
        last = 0 if stores_inside else state_end(request.num_tokens, size, rules.drops)
        if end < prefill_end:
            complete = end // size * size
            if complete > start or size <= self.limits.most_tokens:
                end = complete
        stop = nearer(start, last, end)
        if start % size != 0 and not stores_inside:
            stop = nearer(start, (start // size + 1) * size, stop)
        if rules.partial_hits and not stores_inside:
            tail = state_end(request.prompt_tokens, rules.unit, rules.drops)
            if last < tail < request.prompt_tokens:
                stop = nearer(start, tail, stop)
        shared = request.shared_tokens
        if start < shared < end:
            stop = nearer(start, start + (shared - start) // size * size, stop)
        return max(stop - start, 0)

    def begin_step(self) -> None:
        for group in self.groups:
            group.shared.new_states.clear()
            group.private.new_states.clear()

    def end_step(self) -> bool:
        """Free the source and target blocks of this step's copies."""
        last = self.pool.null
        is_changed = False
        for group in self.groups:
            for block in group.copies:
                last = self.pool.free_block(block, last)
                is_changed = True
            group.copies.clear()
            if group.shared.new_states or group.private.new_states:
                is_changed = True
        return is_changed

    def repeated_tokens(self) -> i64:
        return self.pool.num_repeated * self.rules.unit

    def evicted_blocks(self) -> i64:
        return self.pool.evicted_blocks

    def usage(self) -> float:
        return 1.0 - float(self.pool.num_free) / float(self.pool.num_blocks)

    def reset(self) -> bool:
        return self.pool.reset()


def nearer(start: i64, stop: i64, end: i64) -> i64:
    """Return ``stop`` if it is between ``start`` and ``end``, else ``end``."""
    return stop if start < stop < end else end
