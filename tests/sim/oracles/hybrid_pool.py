"""KV groups with one request at a time on the readable cache, step by step."""

from sim.cache.hybrid import CHUNK_TOKENS
from sim.vllm.config import EngineConfig
from sim.vllm.kvgroups import KvLayout
from tests.sim.oracles.readable.hybrid import HybridCache, HybridScheduler
from tests.sim.oracles.readable.request import Request


def group_hits(cache: HybridCache, request: Request) -> list[tuple[str, int]]:
    """Return the hit that each form of group would have alone, by its name."""
    most, hits = request.num_tokens - 1, []
    for one in cache.alike:
        _, tokens = cache._find(one, request, cache._most(one, request, most), one.drops_last)
        hits.append((one.first.spec.name, tokens))
    return hits


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

    def run(self, request: Request, reach: int = 0) -> tuple[int, str] | None:
        """Serve a request; return its hit tokens, and the group with the shortest hit if they are fewer than ``reach``.

        None: it does not fit the pool, and touches nothing.
        """
        scheduler, cache = self.scheduler, self.scheduler.cache
        if not scheduler.accepts(request):
            return None
        cache.begin_step()
        hits = cache.look_up(request)
        blamed = "" if hits.tokens >= reach else min(group_hits(cache, request), key=lambda one: one[1])[0]
        at, held = hits.tokens, False
        while at < request.last_token - 1:
            end = self._step_end(request, at)
            held = cache.extend(request, end) if held else cache.admit(request, hits, end - at)
            if not held:
                cache.release(request)
                return None
            at = request.num_computed = end
            cache.end_step()
            cache.begin_step()
        cache.release(request)
        return hits.tokens, blamed

    def _step_end(self, request: Request, at: int) -> int:
        if at < request.prompt_tokens:
            return at + self.scheduler.clip(request, at, min(request.prompt_tokens - at, CHUNK_TOKENS))
        # Between two match units decoding changes nothing; the last step frees what the window has left.
        unit, last = self.scheduler.config.block_size, request.last_token - 1
        request.num_tokens = min((at // unit + 1) * unit, last if at == last - 1 else last - 1)
        return request.num_tokens
