"""The scheduler call by call, for tests of every step. Blocks are identified by their contents."""

from collections.abc import Sequence

import numpy as np

from measure.cache.vectors import integers
from sim.engine.deployment import Deployment
from sim.engine.simulation import make_scheduler
from sim.vllm.config import EngineConfig
from sim.vllm.kvcache import SingleGroupCache
from sim.vllm.request import ANY_HITS, Request
from sim.vllm.scheduler import Step
from sim.vllm.segments import SHARED, Copy, SegmentPool
from tests.sim.oracles.readable.request import Request as ReadableRequest

Content = tuple[int, int]
"""A block's key, and its position among the blocks of that key."""


def request_like(readable: ReadableRequest, index: int) -> Request:
    """The same request, whose keys are all known."""
    return Request(
        readable.request_id,
        readable.prompt_tokens,
        readable.output_tokens,
        integers(np.array(readable.hashes, np.uint64)),
        num_keys=len(readable.hashes),
        index=index,
        arrival_ms=readable.arrival_ms,
        hit_limit=0 if readable.prompt_logprobs else ANY_HITS,
        token_limit=readable.prompt_tokens + readable.max_tokens,
    )


class SteppedScheduler:
    """Requests by position in the given order."""

    def __init__(
        self, config: EngineConfig, requests: Sequence[ReadableRequest], deployment: Deployment | None = None
    ) -> None:
        self.scheduler = make_scheduler(config, deployment)
        self.requests = [request_like(readable, position) for position, readable in enumerate(requests)]
        cache = self.scheduler.cache
        assert isinstance(cache, SingleGroupCache)
        self.pool = cache.pool
        self._steps = (Step(), Step())

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work() or bool(self.loading)

    @property
    def loading(self) -> list[int]:
        """Places of the requests that wait for blocks from a tier, the first to begin first."""
        offloading = self.scheduler.offloading
        return [] if offloading is None else [int(request.index) for request in offloading.loading]

    def loaded_blocks(self, position: int) -> int:
        return int(self.requests[position].num_blocks - self.requests[position].num_hashed)

    def requeue_loaded(self, position: int) -> None:
        self.scheduler.requeue_loaded(self.requests[position])

    def add(self, position: int) -> None:
        self.scheduler.add(self.requests[position])

    def abort(self, position: int) -> None:
        self.scheduler.abort(self.requests[position])

    def schedule(self, slot: int) -> None:
        self.scheduler.schedule(self._steps[slot])

    def finish_step(self, slot: int) -> None:
        self.scheduler.finish_step(self._steps[slot])

    def shares(self, slot: int) -> list[tuple[int, int, int]]:
        """Place, tokens and depth of each share."""
        step = self._steps[slot]
        return [(share.request.index, share.num_tokens, share.depth) for share in step.shares[: step.count]]

    def preempted(self, slot: int) -> list[int]:
        """Places preempted in a step."""
        return [int(request.index) for request in self._steps[slot].preempted]

    def stats(self) -> tuple[int, int, int]:
        stats = self.scheduler.stats
        return int(stats.requests), int(stats.query_tokens), int(stats.hit_tokens)


def free_contents(pool: SegmentPool) -> list[Content | None]:
    """Contents of the free blocks in order of allocation. None: no key."""
    contents: list[Content | None] = [None] * int(pool.num_unhashed)
    copy = pool._queue.after
    while copy is not pool._queue:
        contents += reversed(_contents(copy))
        copy = copy.after
    return contents


def holders(pool: SegmentPool) -> dict[Content, int]:
    """Of every cached block, how many hold it."""
    references: dict[Content, int] = {}
    for segment in pool._shared.values():
        copy = segment.copy
        while True:
            references |= dict.fromkeys(_contents(copy), int(copy.references))
            copy = copy.next_twin
            if copy is segment.copy:
                break
    return references


def _contents(copy: Copy) -> list[Content]:
    """Of one copy's blocks, root first."""
    segment = copy.segment
    assert segment.owner == SHARED, "the workloads' keys are all known"
    twin_number, line = 0, segment.copy
    while line is not copy:
        line, twin_number = line.next_twin, twin_number + 1
    keys = [segment.keys[segment.base + depth] for depth in range(segment.start, segment.end)]
    return [(int(key), twin_number) for key in keys]
