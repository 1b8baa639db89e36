"""A request in the scheduler: its tokens, its KV blocks and its progress. mypyc compiles this module."""

from typing import Final

from mypy_extensions import i64

from measure.cache.hashtable import BoxedVec
from sim.vllm.blocks import NO_TABLES, Table
from sim.vllm.segments import BlockTable

WAITING: Final = 0
RUNNING: Final = 1
LOADING: Final = 2
"""It waits for KV blocks from memory behind the pool (vLLM's ``WAITING_FOR_REMOTE_KVS``)."""
FINISHED: Final = 3
NOT_ADMITTED: Final = -1
ANY_HITS: Final = 1 << 62


class Request(BlockTable):
    """Request in the scheduler; compared by identity, because a scheduler holds each once.

    Its chain of block keys is ``keys[first_key : first_key + known_keys]``; the keys of the blocks behind these are
    private. ``hit_limit``: blocks that may hit at most, 0 where log probabilities of all prompt tokens were asked for.
    ``token_limit``: tokens at which the engine stops it at the latest, 0: at its own end. An asynchronous engine that
    is not sure of the end schedules one step more, whose token is thrown away.
    """

    def __init__(
        self,
        request_id: str,
        prompt_tokens: i64,
        output_tokens: i64,
        keys: BoxedVec,
        *,
        first_key: i64 = 0,
        known_keys: i64 = 0,
        index: i64 = 0,
        arrival_ms: float = 0.0,
        hit_limit: i64 = ANY_HITS,
        token_limit: i64 = 0,
    ) -> None:
        super().__init__(keys, index, first_key, known_keys)
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError(f"request {request_id}: needs a prompt and an output of at least one token")
        self.request_id: str = request_id
        self.prompt_tokens: i64 = prompt_tokens
        self.last_token: i64 = prompt_tokens + output_tokens
        """Tokens of prompt and output. The KV of the last one is never computed."""
        self.token_limit: i64 = max(token_limit, self.last_token)
        self.arrival_ms: float = arrival_ms
        self.hit_limit: i64 = hit_limit
        self.status: i64 = WAITING
        self.num_tokens: i64 = prompt_tokens
        """Tokens known so far: the prompt and what was generated."""
        self.num_computed: i64 = 0
        """Tokens whose KV is in blocks, steps in flight included; 0 again after a preemption."""
        self.room_tokens: i64 = 0
        """Tokens that its blocks can hold."""
        self.num_hashed: i64 = 0
        """Leading blocks that are in the prefix cache under its keys."""
        self.next_full: i64 = 0
        """Tokens that fill the block after those: until then the prefix cache gets nothing new."""
        self.placeholders: i64 = 0
        """Tokens that steps in flight will sample (vLLM's ``num_output_placeholders``)."""
        self.steps_in_flight: i64 = 0
        self.tokens_in_flight: i64 = 0
        """Tokens that those steps compute."""
        self.stale_steps: i64 = 0
        """Those of ``steps_in_flight`` that were scheduled before the last preemption: their tokens still count."""
        self.cached_tokens: i64 = NOT_ADMITTED
        """Prompt tokens taken from the prefix cache at the first admission, as vLLM reports."""
        self.first_offloaded: i64 = 1 << 62
        """Its blocks from here to ``num_offloaded`` were stored in or loaded from memory behind the pool."""
        self.num_offloaded: i64 = 0
        self.load_end_ms: float = 0.0
        self.tables: list[Table] = NO_TABLES
        """Its blocks by KV group, where there are several."""
        self.shared_tokens: i64 = 0
        """Tokens of the longest hit of one of the groups, where that is longer than the hit."""

    @property
    def num_generated(self) -> i64:
        """Tokens generated so far."""
        return self.num_tokens - self.prompt_tokens

    def is_finished(self) -> bool:
        """True if it has ended or was aborted."""
        return self.status == FINISHED
