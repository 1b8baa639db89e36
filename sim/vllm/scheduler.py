"""vLLM V1's scheduler: running requests first, then the waiting queue, first come first served.

``schedule`` composes a scheduler step and counts its tokens as computed. ``finish_step`` (vLLM's
``update_from_output``) appends the sampled tokens. Without async scheduling the engine alternates the two. With async
scheduling (vLLM's default) the engine composes the next step while a step runs: schedule, schedule, finish, schedule,
finish …; a decoding request is then scheduled on a placeholder for the token that the step in flight will sample. Both
orders run the same code: without async scheduling the placeholders are 0. mypyc compiles this module.
"""

from collections import deque

from mypy_extensions import i64

from sim.vllm.kvcache import KVCache
from sim.vllm.offloading import WAIT, Offloading
from sim.vllm.request import FINISHED, LOADING, NOT_ADMITTED, RUNNING, WAITING, Request


class Share:
    """Tokens of a request scheduled in a step. ``depth``: tokens computed before the step. ``samples``: the step
    samples a token; False for a prefill chunk that leaves prompt tokens."""

    def __init__(self, request: Request, num_tokens: i64, depth: i64, samples: bool) -> None:
        self.request: Request = request
        self.num_tokens: i64 = num_tokens
        self.depth: i64 = depth
        self.samples: bool = samples


class Step:
    """Composed scheduler step (vLLM's ``SchedulerOutput``): the first ``count`` of ``shares``. Later entries are
    reused by the next step, without an allocation."""

    def __init__(self) -> None:
        self.shares: list[Share] = []
        self.count: i64 = 0
        self.total_tokens: i64 = 0
        self.admitted: i64 = 0
        """Number of requests admitted from the waiting queue; their shares come last."""
        self.preempted: list[Request] = []
        self.repeated_tokens: i64 = 0
        """KV cache tokens that running requests share: references to a block beyond the first."""

    def clear(self) -> None:
        """Empty the step."""
        self.count = 0
        self.total_tokens = 0
        self.admitted = 0
        self.preempted.clear()
        self.repeated_tokens = 0

    def launch(self, request: Request, tokens: i64) -> None:
        """Schedule ``tokens`` of the request; the scheduler counts them as computed from now on."""
        depth = request.num_computed
        request.num_computed = depth + tokens
        samples = request.num_computed >= request.num_tokens + request.placeholders
        if samples:
            request.placeholders += 1
        request.steps_in_flight += 1
        request.tokens_in_flight += tokens
        if self.count < len(self.shares):
            share = self.shares[self.count]
            share.request = request
            share.num_tokens = tokens
            share.depth = depth
            share.samples = samples
        else:
            self.shares.append(Share(request, tokens, depth, samples))
        self.count += 1
        self.total_tokens += tokens


class PrefixStats:
    """vLLM's prefix cache counters, in tokens: queries and hits at first admission, not after a preemption."""

    def __init__(self) -> None:
        self.requests: i64 = 0
        self.query_tokens: i64 = 0
        self.hit_tokens: i64 = 0


class Scheduler:
    """Waiting queue and running requests over one KV cache. docs/simulator.md numbers the rules.

    ``caching``: prefix caching is on. ``max_tokens``: limit on prompt plus output tokens (vLLM's ``max_model_len``).
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_num_seqs: i64,
        max_num_batched_tokens: i64,
        max_tokens: i64,
        caching: bool = True,
        offloading: Offloading | None = None,
    ) -> None:
        self.cache: KVCache = cache
        self.offloading: Offloading | None = offloading
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stats: PrefixStats = PrefixStats()
        self.is_quiet: bool = False
        """True: since the last step, no event could let a waiting request be admitted."""
        self._is_blocked: bool = False
        """True: the head of the waiting queue lacked free blocks, and none was freed since."""
        self._max_num_seqs: i64 = max_num_seqs
        self._max_num_batched_tokens: i64 = max_num_batched_tokens
        self._max_tokens: i64 = max_tokens
        self._caching: bool = caching

    def accepts(self, request: Request) -> bool:
        """Return whether the request can finish: it fits ``max_tokens`` and, alone, the KV cache."""
        return request.last_token <= self._max_tokens and self.cache.fits(request)

    def add(self, request: Request) -> None:
        """Append a request to the waiting queue (vLLM's ``add_request``). Raises ValueError unless the scheduler
        ``accepts`` the request, which would block the queue for ever."""
        if not self.accepts(request):
            raise ValueError(f"request {request.request_id}: {request.last_token} tokens do not fit this engine")
        request.token_limit = min(request.token_limit, self._max_tokens)
        self.waiting.append(request)
        self._wake()

    def schedule(self, step: Step) -> int:
        """Compose the next scheduler step; return the number of preemptions."""
        step.clear()
        self.cache.begin_step()
        self._schedule_running(step)
        if not step.preempted and self.waiting and not self._is_blocked:
            self._admit_waiting(step)
        step.repeated_tokens = self.cache.repeated_tokens()
        self.is_quiet = True
        if self.cache.end_step():
            self._wake()
        if self.offloading is not None:
            if not self.offloading.store_blocks([share.request for share in step.shares[: step.count]]):
                self.is_quiet = False  # the next step tries again
            self.offloading.touch_finished()
        return len(step.preempted)

    def schedule_when_idle(self, step: Step) -> int:
        """Compose a step while no step runs; compose again at once if preemption left the step empty, as no step in
        flight will free blocks. Return the number of preemptions."""
        preemptions = 0
        while True:
            preemptions += self.schedule(step)
            if step.count > 0 or not step.preempted:
                return preemptions

    def finish_step(self, step: Step) -> list[Request]:
        """Append the tokens that the step sampled (vLLM's ``update_from_output``). Free the blocks of the requests that
        finish, and return these requests."""
        finished: list[Request] = []
        for number in range(step.count):
            share = step.shares[number]
            request = share.request
            request.steps_in_flight -= 1
            request.tokens_in_flight -= share.num_tokens
            stale = request.stale_steps > 0
            if stale:
                request.stale_steps -= 1
                self._wake()
            if not share.samples or request.status == FINISHED:
                continue
            request.num_tokens += 1
            if not stale:
                request.placeholders -= 1
                self._cache_blocks(request, request.num_computed - request.placeholders)
            if request.num_tokens == request.last_token:
                if request.status == WAITING:  # the step of its last token was scheduled before its preemption
                    self.waiting.remove(request)
                self._finish(request)
                finished.append(request)
        if finished:
            self.running = [request for request in self.running if request.status != FINISHED]
        return finished

    def abort(self, request: Request) -> None:
        """Abort a request in any state and free its blocks at once; a finished request does not change."""
        if request.status == FINISHED:
            return
        if request.status == RUNNING:
            self.running.remove(request)
        elif request.status == LOADING:
            if self.offloading is not None:
                self.offloading.loading.remove(request)
        else:
            self.waiting.remove(request)
        self._finish(request)

    def requeue_loaded(self, request: Request) -> None:
        """Put a request loaded from host memory into the waiting queue, before requests without blocks."""
        if self.offloading is not None:
            self.offloading.loading.remove(request)
        request.status = WAITING
        self.waiting.insert(self._num_loaded(), request)
        self._wake()

    def has_work(self) -> bool:
        """Return whether a request is waiting or running."""
        return len(self.running) > 0 or len(self.waiting) > 0

    def num_new_tokens(self, request: Request) -> i64:
        """Return the tokens to compute, placeholders included; 0: a step in flight samples the last token."""
        placeholders = request.placeholders
        computed = request.num_computed
        if placeholders > 0 and computed + 2 - placeholders >= request.token_limit:
            return 0
        return request.num_tokens + placeholders - computed

    def _schedule_running(self, step: Step) -> None:
        """Rule 12, running requests: schedule decode tokens and prefill chunks in order, within the token budget."""
        budget = self._max_num_batched_tokens
        position: i64 = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            position += 1
            tokens = self.num_new_tokens(request)
            if tokens > 1:
                tokens = self.cache.clip(request, request.num_computed, min(tokens, budget))
            if tokens == 0:
                continue
            end = request.num_computed + tokens
            within_block = end <= request.allocated_tokens and end < request.next_full
            if not within_block and not self._allocate_or_preempt(request, end, step):
                break
            step.launch(request, tokens)
            budget -= tokens

    def _admit_waiting(self, step: Step) -> None:
        """Rule 12, waiting queue: admit the head while its complete prompt has free blocks; else stop."""
        budget = self._max_num_batched_tokens - step.total_tokens
        skipped: list[Request] = []
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            if request.stale_steps > 0:
                # A step in flight still samples a token for this preempted request: the next request may go first.
                skipped.append(self.waiting.popleft())
                continue
            is_loaded = request.num_blocks > 0
            hit_tokens = request.num_computed if is_loaded else self.cache.look_up(request)
            if is_loaded:
                self._cache_blocks(request, min(request.allocated_tokens, request.num_tokens))
            elif self.offloading is not None:
                end = self.offloading.find_prefix(request)
                if end == WAIT:  # another request is loading blocks of the same prefix
                    skipped.append(self.waiting.popleft())
                    continue
                if end > self.offloading.hits:
                    if not self._begin_load(request, end):
                        break
                    continue
            tokens = self.cache.clip(request, hit_tokens, min(request.num_tokens - hit_tokens, budget))
            if tokens == 0:
                break
            if not self.cache.admit(request, hit_tokens, tokens):
                self._is_blocked = self.offloading is None
                break
            self.waiting.popleft()
            self.running.append(request)
            request.status = RUNNING
            if not is_loaded:
                self._count_admission(request, hit_tokens)
            self._cache_blocks(request, min(request.num_computed + tokens, request.num_tokens))
            step.admitted += 1
            step.launch(request, tokens)
            budget -= tokens
        self.waiting.extendleft(reversed(skipped))

    def _begin_load(self, request: Request, end: i64) -> bool:
        """Start loading the queue head's blocks up to ``end`` from host memory. False: too few free blocks."""
        offloading = self.offloading
        if offloading is None or not offloading.begin_load(request, end, self.running):
            return False
        self.waiting.popleft()
        request.status = LOADING
        self._count_admission(request, offloading.hits * offloading.block_size)
        if request.preemptions == 0:
            request.cached_tokens = min(request.allocated_tokens, request.num_tokens)
        return True

    def _allocate_or_preempt(self, request: Request, end: i64, step: Step) -> bool:
        """Rule 13: preempt the last running request until blocks up to ``end`` are free; False: preempted itself."""
        while not self.cache.extend(request, end):
            victim = self.running.pop()
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return False
        self._cache_blocks(request, min(end, request.num_tokens))
        return True

    def _count_admission(self, request: Request, hit_tokens: i64) -> None:
        if request.cached_tokens == NOT_ADMITTED:
            request.cached_tokens = hit_tokens
        if self._caching and request.hit_limit > 0 and request.preemptions == 0:
            self.stats.requests += 1
            self.stats.query_tokens += request.num_tokens
            self.stats.hit_tokens += hit_tokens

    def _cache_blocks(self, request: Request, end: i64) -> None:
        if end >= request.next_full and self.cache.cache_blocks(request, end):
            self._wake()

    def _preempt(self, request: Request) -> None:
        """Rule 13, preemption by recompute: free the blocks and put the request back at the head of the waiting queue.
        Steps in flight still deliver their tokens."""
        self._free_blocks(request)
        request.status = WAITING
        request.stale_steps = request.steps_in_flight
        request.preemptions += 1
        self.waiting.insert(self._num_loaded(), request)

    def _finish(self, request: Request) -> None:
        self._free_blocks(request)
        request.status = FINISHED
        if self.offloading is not None:
            self.offloading.finished.append(request)

    def _free_blocks(self, request: Request) -> None:
        self.cache.free(request)
        request.num_computed = 0
        request.placeholders = 0
        self._wake()

    def _num_loaded(self) -> int:
        """Count the requests at the head of the waiting queue whose blocks were loaded from host memory."""
        count = 0
        for request in self.waiting:
            if request.num_blocks == 0:
                break
            count += 1
        return count

    def _wake(self) -> None:
        """Retry admission in the next step."""
        self.is_quiet = False
        self._is_blocked = False
