"""vLLM V1's scheduler: running requests first, then the waiting queue, first come first served.

``schedule`` composes a scheduler step and counts its tokens as computed; ``finish_step`` appends the sampled tokens.
Without async scheduling the engine alternates the two. With async scheduling (vLLM's default) it composes the next step
while a step runs: schedule, schedule, finish, schedule, finish …; a decoding request is then scheduled on a placeholder
for the token that the step in flight will sample. Both orders run the same code: else the placeholders are 0.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sim.vllm.config import EngineConfig
from tests.sim.oracles.readable.pool import BlockPool
from tests.sim.oracles.readable.request import Request
from tests.sim.oracles.readable.rules import blocks_for, lookup_limit


class Scheduled(NamedTuple):
    """Tokens of a request scheduled in a step."""

    request: Request
    num_tokens: int
    depth: int
    """Tokens whose KV was there before, in tokens."""
    samples: bool
    """True if the step samples a token for it: not while prompt tokens remain."""


@dataclass(slots=True)
class Step:
    """Composed step: the tokens of each request, and the preempted requests."""

    scheduled: list[Scheduled] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    """Requests of ``scheduled`` that were in the queue, new or preempted."""
    repeated_tokens: int = 0
    """Tokens of blocks that running requests hold and another held before."""

    @property
    def total_tokens(self) -> int:
        return sum(share.num_tokens for share in self.scheduled)


@dataclass(slots=True)
class PrefixStats:
    """vLLM's prefix cache counters, in tokens: queries and hits at first admission, not after a preemption."""

    requests: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0

    def record(self, request: Request, hit_tokens: int) -> None:
        if request.preemptions == 0:
            self.requests += 1
            self.query_tokens += request.num_tokens
            self.hit_tokens += hit_tokens


class Scheduler:
    """Waiting queue and running requests over one block pool. docs/simulator.md numbers the rules."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_gpu_blocks, config.block_size, config.enable_prefix_caching)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stats = PrefixStats()
        self._max_tokens = config.longest_request
        self._clips = False
        """Ends of chunks matter, as ``clip`` has them."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def accepts(self, request: Request) -> bool:
        """Return whether ``request`` can finish: it fits the model's length and, alone, the block pool."""
        blocks = blocks_for(request.last_token - 1, self.config.block_size)
        return request.last_token <= self._max_tokens and blocks <= self.config.usable_blocks

    def add(self, request: Request) -> None:
        """Queue ``request``. Raises ValueError for one that ``accepts`` refuses: it would block the queue for ever."""
        if not self.accepts(request):
            raise ValueError(f"request {request.request_id}: {request.last_token} tokens do not fit this engine")
        if len(request.hashes) < (request.last_token - 1) // self.config.block_size:
            raise ValueError(f"request {request.request_id}: its chain of {len(request.hashes)} keys is too short")
        request.max_tokens = min(request.max_tokens, self._max_tokens - request.prompt_tokens)
        self.waiting.append(request)

    def schedule(self) -> Step:
        """Compose the next step; its tokens count as computed from now on."""
        step = Step()
        self._schedule_running(step)
        if not step.preempted:
            self._admit_waiting(step)
        step.repeated_tokens = self.pool.num_repeated * self.config.block_size
        return step

    def schedule_when_idle(self) -> Step:
        """Compose a step while none runs: again at once while every share of a step was preempted for blocks, for
        there is nothing to wait for. ``preempted`` has the requests of all these attempts."""
        preempted: list[Request] = []
        while True:
            step = self.schedule()
            preempted += step.preempted
            if step.scheduled or not step.preempted:
                step.preempted = preempted
                return step

    def finish_step(self, step: Step) -> list[Request]:
        """Append the tokens that ``step`` sampled; free and return the requests that finish."""
        finished = []
        for request, tokens, _, samples in step.scheduled:
            request.steps_in_flight -= 1
            request.tokens_in_flight -= tokens
            stale = request.stale_steps > 0
            if stale:
                request.stale_steps -= 1
            if samples and request.state != "finished":
                request.num_tokens += 1
                if not stale:
                    request.placeholders -= 1
                    self._cache_blocks(request, request.num_computed - request.placeholders)
                if request.num_tokens == request.prompt_tokens + request.output_tokens:
                    self._retire(request)
                    finished.append(request)
        if finished:
            self._drop_finished(finished)
        return finished

    def abort(self, request: Request) -> None:
        """Abort ``request`` in any state and free its blocks; a finished request does not change."""
        if request.state == "finished":
            return
        if request.state == "running":
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._retire(request)

    def _schedule_running(self, step: Step) -> None:
        """Rule 12, running requests: schedule decode tokens and prefill chunks in order."""
        running, budget = self.running, self.config.max_num_batched_tokens
        position = 0
        while position < len(running) and budget > 0:
            request = running[position]
            position += 1
            tokens = self.num_new_tokens(request)
            if tokens == 0:
                continue
            if tokens > 1:
                tokens = min(tokens, budget)
                if self._clips and not (tokens := self.clip(request, request.num_computed, tokens)):
                    continue
            end = request.num_computed + tokens
            within_block = end <= request.allocated_tokens and end < request.next_full
            if not within_block and not self._allocate_or_preempt(request, end, step):
                break
            self._launch(request, tokens, step)
            budget -= tokens

    def _admit_waiting(self, step: Step) -> None:
        """Rule 12, waiting queue: admit the head while its complete prompt fits; else stop."""
        waiting, running = self.waiting, self.running
        budget = self.config.max_num_batched_tokens - step.total_tokens
        skipped: list[Request] = []
        while waiting and budget > 0 and len(running) < self.config.max_num_seqs:
            request = waiting[0]
            if request.stale_steps > 0:
                # A token of before its preemption is still to come; the next in line may go first.
                skipped.append(waiting.popleft())
                continue
            hits, hit_tokens = self._look_up(request)
            tokens = min(request.num_tokens - hit_tokens, budget)
            if self._clips and not (tokens := self.clip(request, hit_tokens, tokens)):
                break
            if not self._admit(request, hits, hit_tokens, tokens):
                break
            waiting.popleft()
            running.append(request)
            self._count_admission(request, hit_tokens)
            step.admitted.append(request)
            self._launch(request, tokens, step)
            budget -= tokens
        waiting.extendleft(reversed(skipped))

    def clip(self, request: Request, start: int, tokens: int) -> int:
        """Return the size of the prefill chunk at ``start``, at most ``tokens``."""
        return tokens

    def num_new_tokens(self, request: Request) -> int:
        """Return the tokens to compute, placeholders included; 0: a step in flight samples the last token."""
        placeholders, computed = request.placeholders, request.num_computed
        if placeholders and computed + 2 - placeholders >= request.prompt_tokens + request.max_tokens:
            return 0
        return request.num_tokens + placeholders - computed

    def _allocate_or_preempt(self, request: Request, end: int, step: Step) -> bool:
        """Rule 13: preempt the last running request until tokens up to ``end`` have blocks; False if that preempted the
        request itself."""
        while not self._extend(request, end):
            victim = self.running.pop()
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _look_up(self, request: Request) -> tuple[Any, int]:
        """Hits of a request in the queue, as an argument of ``_admit``, and their tokens."""
        most_hits = lookup_limit(request.num_tokens, self.config.block_size, int(request.prompt_logprobs))
        hits = self.pool.lookup(request.hashes, most_hits)
        return hits, len(hits) * self.config.block_size

    def _admit(self, request: Request, hits: Any, hit_tokens: int, tokens: int) -> bool:
        """Rule 9: give ``request`` its hits and blocks for ``tokens`` more, if its complete prompt has blocks now."""
        blocks = blocks_for(request.num_tokens, self.config.block_size)
        if blocks_needed(blocks, len(hits), self.pool.count_idle(hits)) > self.pool.num_free:
            return False
        self.pool.touch(hits)
        request.blocks = hits
        request.num_computed = request.allocated_tokens = hit_tokens
        self._count_hashed(request, len(hits))
        extended = self._extend(request, hit_tokens + tokens)
        assert extended, "a prompt that fits found no block"
        return True

    def _count_admission(self, request: Request, hit_tokens: int) -> None:
        if self.pool.enable_prefix_caching and not request.prompt_logprobs:
            self.stats.record(request, hit_tokens)
        if request.cached_tokens is None:
            request.cached_tokens = hit_tokens
        request.state = "running"

    def _extend(self, request: Request, end: int) -> bool:
        """Give ``request`` blocks for its tokens up to ``end``; False, and nothing changed, if they are not free."""
        lacking = blocks_for(end, self.config.block_size) - len(request.blocks)
        if lacking > 0:
            if lacking > self.pool.num_free:
                return False
            request.blocks += self.pool.allocate(lacking)
            request.allocated_tokens += lacking * self.config.block_size
        self._cache_blocks(request, min(end, request.num_tokens))
        return True

    def _cache_blocks(self, request: Request, end: int) -> None:
        """Rule 10: full blocks can be hit from here on, also within the same step."""
        if end >= request.next_full:
            full, hashed = end // self.config.block_size, request.num_hashed
            self.pool.insert(request.blocks[hashed:full], request.hashes[hashed:full])
            self._count_hashed(request, full)

    def _count_hashed(self, request: Request, blocks: int) -> None:
        request.num_hashed = blocks
        request.next_full = (blocks + 1) * self.config.block_size

    def _launch(self, request: Request, tokens: int, step: Step) -> None:
        depth = request.num_computed
        request.num_computed = computed = depth + tokens
        samples = computed >= request.num_tokens + request.placeholders
        if samples:
            request.placeholders += 1
        request.steps_in_flight += 1
        request.tokens_in_flight += tokens
        step.scheduled.append(Scheduled(request, tokens, depth, samples))

    def _preempt(self, request: Request) -> None:
        """Rule 13, preemption by recompute: free the blocks and requeue; steps in flight still deliver their tokens."""
        self._give_back(request)
        request.state = "waiting"
        request.stale_steps = request.steps_in_flight
        request.preemptions += 1
        self.waiting.appendleft(request)

    def _retire(self, request: Request) -> None:
        self._give_back(request)
        request.state = "finished"

    def _give_back(self, request: Request) -> None:
        self.pool.free_blocks(request.blocks)
        request.blocks = []
        request.allocated_tokens = request.num_computed = request.placeholders = 0
        self._count_hashed(request, 0)

    def _drop_finished(self, finished: list[Request]) -> None:
        self.running = [request for request in self.running if request.state != "finished"]
        # A preempted request ends here if its last token came from a step scheduled before its preemption.
        for request in finished:
            if request.preemptions and request in self.waiting:
                self.waiting.remove(request)


def blocks_needed(blocks: int, hits: int, idle_hits: int) -> int:
    """Free blocks that admitting a request of ``blocks`` uses up: hits that no request holds leave the
    free queue too (rule 8)."""
    return blocks - hits + idle_hits
