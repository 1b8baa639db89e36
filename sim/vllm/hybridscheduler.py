"""The scheduler over a KV cache of several groups."""

from sim.vllm.config import EngineConfig
from sim.vllm.hybridcache import Hits, HybridCache
from sim.vllm.pool import BlockPool
from sim.vllm.request import Request
from sim.vllm.scheduler import Scheduler, Step
from sim.vllm.statecache import state_end, stores_inside
from tracefile.records.schema import MOST_TOKENS


def cache_of(config: EngineConfig, pool: BlockPool) -> HybridCache:
    """Return the cache of an engine's KV groups over ``pool``."""
    assert config.layout is not None
    steps = 2 if config.async_scheduling else 1
    return HybridCache(config.layout, pool, steps * config.max_num_batched_tokens, config.max_model_len or MOST_TOKENS)


class HybridScheduler(Scheduler):
    """``Scheduler`` with the KV groups of ``config.layout``; chunks of a prompt end where states are kept."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.cache = cache_of(config, self.pool)
        self.layout = self.cache.layout
        states = [spec for spec in self.layout.groups if spec.keeps_state]
        self._clips = bool(states) and config.enable_prefix_caching
        self._state_block = states[0].block_size if states else 0
        self._stores_inside = all(spec.kind == "mamba2" for spec in states)

    def accepts(self, request: Request) -> bool:
        fits = self.cache.most_blocks(request.last_token - 1) <= self.config.usable_blocks
        return fits and request.last_token <= self._max_tokens

    def schedule(self) -> Step:
        self.cache.begin_step()
        step = super().schedule()
        self.cache.end_step()
        return step

    def clip(self, request: Request, start: int, tokens: int) -> int:
        """Let a chunk of the prompt end at a block, before the last state worth keeping, or at it."""
        prefill_end = max(request.prompt_tokens, request.num_tokens - 1)
        if not self._clips or start >= prefill_end:
            return tokens
        size, unit, layout = self._state_block, self.config.block_size, self.layout
        drops, end = bool(layout.dropping), start + tokens
        kept = unit if layout.partial_hits else size
        checkpoint = state_end(prefill_end, kept, drops)
        inside = self._stores_inside and end >= prefill_end and stores_inside(start, end, checkpoint, unit, size)
        last = 0 if inside else state_end(request.num_tokens, size, drops)
        if end < prefill_end:
            most = self.config.max_num_batched_tokens
            most = min(most, self.config.long_prefill_token_threshold or most)
            whole = end // size * size
            if whole > start or size <= most:
                end = whole
        stops = [last]
        if start % size and not inside:
            stops.append((start // size + 1) * size)
        tail = state_end(request.prompt_tokens, unit, drops) if layout.partial_hits and not inside else 0
        if last < tail < request.prompt_tokens:
            stops.append(tail)
        boundary = request.shared_tokens
        if start < boundary < end:
            stops.append(start + (boundary - start) // size * size)
        return max(min((stop for stop in stops if start < stop < end), default=end) - start, 0)

    def _look_up(self, request: Request) -> tuple[Hits, int]:
        hits = self.cache.look_up(request)
        return hits, hits.tokens

    def _admit(self, request: Request, hits: Hits, hit_tokens: int, tokens: int) -> bool:
        if not self.cache.admit(request, hits, tokens):
            return False
        request.num_computed = hit_tokens
        return True

    def _extend(self, request: Request, end: int) -> bool:
        return self.cache.extend(request, end)

    def _publish(self, request: Request, end: int) -> None:
        self.cache.publish(request, end)

    def _give_back(self, request: Request) -> None:
        self.cache.release(request)
        request.num_computed = request.placeholders = 0

    def check_integrity(self) -> None:
        held = [[b for b in table if b] for one in self.running for table in self.cache.tables(one)]
        self.pool.check_integrity(held)


def make_scheduler(config: EngineConfig) -> Scheduler:
    """Return the scheduler of an engine with one KV group or several."""
    return Scheduler(config) if config.kv_groups is None else HybridScheduler(config)
