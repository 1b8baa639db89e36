"""Several engines behind one port: each with a pool, a scheduler and a clock of its own, and a rule that picks one."""

import asyncio
from collections.abc import Sequence

from engines.routing import RULES, SEES_CACHE, Query, Standing
from sim.latency.modelfile import Model
from sim.serving.engine.realtime import RealTimeEngine


class Fleet:
    """``rule`` is a name of ``engines.routing.RULES``; each engine draws noise of its own from ``noise_seed``."""

    def __init__(self, model: Model, count: int, rule: str, *, speed: float | None, noise_seed: int | None) -> None:
        seeds = [None if noise_seed is None else noise_seed + place for place in range(count)]
        self.engines = [RealTimeEngine(model, speed=speed, noise_seed=seed) for seed in seeds]
        self.model = model
        self._rule, self._sees_cache = RULES[rule], rule in SEES_CACHE
        self._requests = 0

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.model.engine.block_size

    async def run(self) -> None:
        """Step for ever; cancel it to stop. Ends only by a fault."""
        async with asyncio.TaskGroup() as group:
            for engine in self.engines:
                group.create_task(engine.run())

    def route(self, session: str | None, blocks: Sequence[int]) -> int:
        """Place of the engine that gets the next request."""
        query = Query(self._requests, session, blocks)
        self._requests += 1
        if len(self.engines) == 1:
            return 0
        return self._rule(query, [self._standing(engine, blocks) for engine in self.engines])

    def reset_prefix_cache(self) -> bool:
        """Empty every prefix cache; False if one could not be, because a request holds blocks."""
        done = [engine.reset_prefix_cache() for engine in self.engines]
        return all(done)

    def abort_all(self) -> None:
        """End every request."""
        for engine in self.engines:
            engine.abort_all()

    def _standing(self, engine: RealTimeEngine, blocks: Sequence[int]) -> Standing:
        engine.settle()
        cached = len(engine.scheduler.pool.lookup(list(blocks), len(blocks))) if self._sees_cache else 0
        return Standing(engine.num_running + engine.num_waiting, engine.kv_usage, cached)
