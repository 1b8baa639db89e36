"""Request in the scheduler: tokens, KV cache blocks, progress. mypyc compiles this module."""

from typing import Final

from mypy_extensions import i64

from measure.cache.hashtable import BoxedVec
from sim.vllm.blocks import NO_TABLES, Table
from sim.vllm.segments import BlockTable

WAITING: Final = 0
RUNNING: Final = 1
LOADING: Final = 2
"""Waiting for KV blocks from host memory (vLLM's ``WAITING_FOR_REMOTE_KVS``)."""
FINISHED: Final = 3
NOT_ADMITTED: Final = -1
ANY_HITS: Final = 1 << 62


class Request(BlockTable):
    """Request in the scheduler; compared by identity, as a scheduler has each request once.

    Its block keys (vLLM's ``block_hashes``) are ``keys[first_key : first_key + num_keys]``; later blocks have private
    keys. ``hit_limit``: most blocks of a prefix hit; 0: log probabilities of all prompt tokens are requested.
    ``token_limit``: most prompt plus output tokens, 0: no limit. With async scheduling an engine that cannot predict
    the end schedules one step more and discards its token.
    """

    def __init__(
        self,
        request_id: str,
        prompt_tokens: i64,
        output_tokens: i64,
        keys: BoxedVec,
        *,
        first_key: i64 = 0,
        num_keys: i64 = 0,
        index: i64 = 0,
        arrival_ms: float = 0.0,
        hit_limit: i64 = ANY_HITS,
        token_limit: i64 = 0,
    ) -> None:
        super().__init__(keys, index, first_key, num_keys)
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError(f"request {request_id}: needs a prompt and an output of at least one token")
        self.request_id: str = request_id
        self.prompt_tokens: i64 = prompt_tokens
        self.last_token: i64 = prompt_tokens + output_tokens
        """Prompt plus output tokens. The KV of the last token is never computed."""
        self.token_limit: i64 = max(token_limit, self.last_token)
        self.arrival_ms: float = arrival_ms
        self.hit_limit: i64 = hit_limit
        self.status: i64 = WAITING
        self.num_tokens: i64 = prompt_tokens
        """Prompt tokens plus generated tokens so far."""
        self.num_computed: i64 = 0
        """Tokens with KV in blocks, steps in flight included (``num_computed_tokens``); 0 after a preemption."""
        self.allocated_tokens: i64 = 0
        """Capacity of its blocks, in tokens."""
        self.num_hashed: i64 = 0
        """Leading blocks that are in the prefix cache."""
        self.next_full: i64 = 0
        """Tokens at which the next block is full and enters the prefix cache."""
        self.placeholders: i64 = 0
        """Tokens that steps in flight will sample (vLLM's ``num_output_placeholders``)."""
        self.steps_in_flight: i64 = 0
        self.tokens_in_flight: i64 = 0
        """Tokens that steps in flight compute."""
        self.stale_steps: i64 = 0
        """Steps in flight that were scheduled before the last preemption: their sampled tokens still count."""
        self.cached_tokens: i64 = NOT_ADMITTED
        """Prefix hit at the first admission, in tokens, as vLLM reports."""
        self.first_offloaded: i64 = 1 << 62
        """Blocks from here to ``num_offloaded`` were stored in or loaded from host memory."""
        self.num_offloaded: i64 = 0
        self.load_end_ms: float = 0.0
        self.tables: list[Table] = NO_TABLES
        """Block tables by KV group, for several groups."""
        self.shared_tokens: i64 = 0
        """Longest prefix hit of a single group, in tokens; 0: not longer than the common hit."""

    @property
    def num_generated(self) -> i64:
        """Output tokens generated so far."""
        return self.num_tokens - self.prompt_tokens

    def is_finished(self) -> bool:
        return self.status == FINISHED
