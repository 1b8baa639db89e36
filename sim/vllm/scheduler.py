"""vLLM V1's scheduler, step by step: running requests first, then waiting ones, first come first served.

``schedule`` composes a step and counts its tokens as computed; ``finish_step`` hands out what the step sampled. A
synchronous engine alternates the two. An asynchronous one (vLLM's default) composes the next step while one runs:
schedule, schedule, finish, schedule, finish …; a decoding request is then scheduled on a placeholder for the token that
the step in flight is about to sample. Both orders go through the same code here, as the placeholders are 0 otherwise.
mypyc compiles this module.
"""

from collections import deque

from mypy_extensions import i64

from sim.vllm.kvcache import KVCache
from sim.vllm.offloading import WAIT, Offloading
from sim.vllm.request import FINISHED, LOADING, NOT_ADMITTED, RUNNING, WAITING, Request


class Share:
    """A request's share of a step. ``depth``: tokens whose KV was there before. ``samples``: the step samples a token
    for the request; it does not while prompt tokens remain."""

    def __init__(self, request: Request, num_tokens: i64, depth: i64, samples: bool) -> None:
        self.request: Request = request
        self.num_tokens: i64 = num_tokens
        self.depth: i64 = depth
        self.samples: bool = samples


class Step:
    """A composed step: the first ``count`` of ``shares``. The others are there to be used again."""

    def __init__(self) -> None:
        self.shares: list[Share] = []
        self.count: i64 = 0
        self.total_tokens: i64 = 0
        self.admitted: i64 = 0
        """Its last shares, of requests that came from the queue, first or again."""
        self.preempted: list[Request] = []
        self.repeated_tokens: i64 = 0
        """Tokens of blocks that running requests hold and another request held before."""

    def clear(self) -> None:
        """Make the step empty."""
        self.count = 0
        self.total_tokens = 0
        self.admitted = 0
        self.preempted.clear()
        self.repeated_tokens = 0

    def launch(self, request: Request, tokens: i64) -> None:
        """Give the request a share of ``tokens``, which count as computed from now on."""
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
    """vLLM's prefix-cache counters over admissions, in tokens; not those after a preemption."""

    def __init__(self) -> None:
        self.requests: i64 = 0
        self.query_tokens: i64 = 0
        self.hit_tokens: i64 = 0


class Scheduler:
    """Requests waiting and running on one KV cache. The rules are numbered as in docs/simulator.md.

    ``caching``: prefix hits are counted. ``max_tokens``: of prompt and output together.
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
        """Nothing has happened since the last step was composed that could let a waiting request in."""
        self._is_blocked: bool = False
        """Nothing has happened since the queue's head found no blocks."""
        self._max_num_seqs: i64 = max_num_seqs
        self._max_num_batched_tokens: i64 = max_num_batched_tokens
        self._max_tokens: i64 = max_tokens
        self._caching: bool = caching

    def accepts(self, request: Request) -> bool:
        """Return whether the request could ever finish: its tokens fit the model's length and, alone, the KV cache."""
        return request.last_token <= self._max_tokens and self.cache.fits(request)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that ``accepts`` refuses: it would block the queue for ever."""
        if not self.accepts(request):
            raise ValueError(f"request {request.request_id}: {request.last_token} tokens do not fit this engine")
        request.token_limit = min(request.token_limit, self._max_tokens)
        self.waiting.append(request)
        self._wake()

    def schedule(self, step: Step) -> int:
        """Compose the next step; its tokens count as computed from now on. Return the number of preemptions."""
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
            if not self.offloading.store_step([share.request for share in step.shares[: step.count]]):
                self.is_quiet = False  # the next step tries again
            self.offloading.use_ended()
        return len(step.preempted)

    def schedule_at_rest(self, step: Step) -> int:
        """Compose a step while none runs: again at once as long as every share of one went to make room for others, for
        there is nothing to wait for. Return the number of preemptions."""
        preemptions = 0
        while True:
            preemptions += self.schedule(step)
            if step.count > 0 or not step.preempted:
                return preemptions

    def finish_step(self, step: Step) -> list[Request]:
        """Hand out the tokens that the step sampled; return the requests that this finished, their blocks freed."""
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
                self._publish(request, request.num_computed - request.placeholders)
            if request.num_tokens == request.last_token:
                if request.status == WAITING:  # its last token came from a step scheduled before its preemption
                    self.waiting.remove(request)
                self._retire(request)
                finished.append(request)
        if finished:
            self.running = [request for request in self.running if request.status != FINISHED]
        return finished

    def abort(self, request: Request) -> None:
        """Take the request out, its blocks freed at once, whatever it was doing. A finished one stays as it is."""
        if request.status == FINISHED:
            return
        if request.status == RUNNING:
            self.running.remove(request)
        elif request.status == LOADING:
            if self.offloading is not None:
                self.offloading.loading.remove(request)
        else:
            self.waiting.remove(request)
        self._retire(request)

    def take_up(self, request: Request) -> None:
        """Queue a request whose blocks have come from memory behind the pool: before all that hold none."""
        if self.offloading is not None:
            self.offloading.loading.remove(request)
        request.status = WAITING
        self.waiting.insert(self._num_loaded(), request)
        self._wake()

    def has_work(self) -> bool:
        """Return whether a request waits or runs."""
        return len(self.running) > 0 or len(self.waiting) > 0

    def lacking(self, request: Request) -> i64:
        """Tokens known or about to be sampled, and not computed; 0 where the last token is already on its way."""
        placeholders = request.placeholders
        computed = request.num_computed
        if placeholders > 0 and computed + 2 - placeholders >= request.token_limit:
            return 0
        return request.num_tokens + placeholders - computed

    def _schedule_running(self, step: Step) -> None:
        """Rule 12's first half: every running request in order gets what it lacks."""
        budget = self._max_num_batched_tokens
        position: i64 = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            position += 1
            tokens = self.lacking(request)
            if tokens > 1:
                tokens = self.cache.clip(request, request.num_computed, min(tokens, budget))
            if tokens == 0:
                continue
            end = request.num_computed + tokens
            within_block = end <= request.room_tokens and end < request.next_full
            if not within_block and not self._make_room(request, end, step):
                break
            step.launch(request, tokens)
            budget -= tokens

    def _admit_waiting(self, step: Step) -> None:
        """Rule 12's second half: the queue's head is admitted while its whole prompt fits; it blocks the rest."""
        budget = self._max_num_batched_tokens - step.total_tokens
        skipped: list[Request] = []
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            if request.stale_steps > 0:
                # A token of before its preemption is still to come; the next in line may go first.
                skipped.append(self.waiting.popleft())
                continue
            is_loaded = request.num_blocks > 0
            hit_tokens = request.num_computed if is_loaded else self.cache.look_up(request)
            if is_loaded:
                self._publish(request, min(request.room_tokens, request.num_tokens))
            elif self.offloading is not None:
                end = self.offloading.seek(request)
                if end == WAIT:  # another request is just loading some of its blocks
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
            self._publish(request, min(request.num_computed + tokens, request.num_tokens))
            step.admitted += 1
            step.launch(request, tokens)
            budget -= tokens
        self.waiting.extendleft(reversed(skipped))

    def _begin_load(self, request: Request, end: i64) -> bool:
        """Let the queue's head wait for its blocks up to ``end`` from memory behind the pool, if they have room."""
        offloading = self.offloading
        if offloading is None or not offloading.begin_load(request, end, self.running):
            return False
        self.waiting.popleft()
        request.status = LOADING
        self._count_admission(request, offloading.hits * offloading.block_size)
        if request.preemptions == 0:
            request.cached_tokens = min(request.room_tokens, request.num_tokens)
        return True

    def _make_room(self, request: Request, end: i64, step: Step) -> bool:
        """Rule 13: preempt the last of those running until tokens up to ``end`` have blocks; False if that took the
        request itself."""
        while not self.cache.extend(request, end):
            victim = self.running.pop()
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return False
        self._publish(request, min(end, request.num_tokens))
        return True

    def _count_admission(self, request: Request, hit_tokens: i64) -> None:
        if request.cached_tokens == NOT_ADMITTED:
            request.cached_tokens = hit_tokens
        if self._caching and request.hit_limit > 0 and request.preemptions == 0:
            self.stats.requests += 1
            self.stats.query_tokens += request.num_tokens
            self.stats.hit_tokens += hit_tokens

    def _publish(self, request: Request, end: i64) -> None:
        if end >= request.next_full and self.cache.publish(request, end):
            self._wake()

    def _preempt(self, request: Request) -> None:
        """Rule 13: back into the queue with nothing computed; what is in flight still delivers its token."""
        self._give_back(request)
        request.status = WAITING
        request.stale_steps = request.steps_in_flight
        request.preemptions += 1
        self.waiting.insert(self._num_loaded(), request)

    def _retire(self, request: Request) -> None:
        self._give_back(request)
        request.status = FINISHED
        if self.offloading is not None:
            self.offloading.ended.append(request)

    def _give_back(self, request: Request) -> None:
        self.cache.release(request)
        request.num_computed = 0
        request.placeholders = 0
        self._wake()

    def _num_loaded(self) -> int:
        """Count the requests at the queue's front that hold blocks from memory behind the pool."""
        count = 0
        for request in self.waiting:
            if request.num_blocks == 0:
                break
            count += 1
        return count

    def _wake(self) -> None:
        """Note that a waiting request may be admitted now."""
        self.is_quiet = False
        self._is_blocked = False
