"""KV groups with one request at a time on the readable cache, step by step."""

from sim.cache.pool import CHUNK_TOKENS
from sim.vllm.config import EngineConfig
from sim.vllm.kvgroups import KvLayout
from tests.sim.oracles.readable.hybrid import HybridScheduler
from tests.sim.oracles.readable.request import Request


class HybridPool:
    """The groups of ``layout`` over ``usable_blocks``, between requests."""

    def __init__(self, layout: KvLayout, usable_blocks: int) -> None:
        self.scheduler = HybridScheduler(
            EngineConfig(
                num_gpu_blocks=usable_blocks + 1,
                block_size=layout.match_unit,
                kv_groups=layout.name,
                max_num_batched_tokens=CHUNK_TOKENS,
                async_scheduling=False,
            )
        )

    def run(self, request: Request) -> int | None:
        """Serve a request; return its hit tokens. None: it does not fit the pool, and touches nothing."""
        scheduler, cache = self.scheduler, self.scheduler.cache
        if not scheduler.accepts(request):
            return None
        cache.begin_step()
        hits = cache.look_up(request)
        at, held = hits.tokens, False
        while at < request.last_token - 1:
            end = self._step_end(request, at)
            held = cache.extend(request, end) if held else cache.admit(request, hits, end - at)
            if not held:
                cache.free(request)
                return None
            at = request.num_computed = end
            cache.end_step()
            cache.begin_step()
        cache.free(request)
        return hits.tokens

    def _step_end(self, request: Request, at: int) -> int:
        if at < request.prompt_tokens:
            return at + self.scheduler.clip(request, at, min(request.prompt_tokens - at, CHUNK_TOKENS))
        # Between two match units decoding changes nothing; the last step frees blocks outside the window.
        unit, last = self.scheduler.config.block_size, request.last_token - 1
        request.num_tokens = min((at // unit + 1) * unit, last if at == last - 1 else last - 1)
        return request.num_tokens
