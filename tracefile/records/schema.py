"""The one trace schema: what a request looked like and what became of it, without what it said.

A trace is JSON Lines: the first line ``{"meta": {...}}``, then one record a line in finish order. Field names are
those of vllm-vcr where it has the field. Every time is a float in milliseconds on
one monotonic clock whose zero is ``Meta.epoch_unix_ns``. An absent field equals null; null never means zero.
"""

from typing import Annotated, Any, Literal, NewType

import msgspec

SCHEMA = "kvtape/1"

BlockHash = NewType("BlockHash", int)
"""Chained, keyed 64-bit hash of a prompt's tokens up to the end of one full block."""
RequestId = NewType("RequestId", str)
SessionId = NewType("SessionId", str)

MOST_TOKENS = 1 << 24
"""Of one prompt, output or block: about ten times the longest served context."""
MOST_TOLD = 10**15
"""Of a number that an engine tells of itself."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Ordinal = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
Blocks = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Word64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Time = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""Milliseconds: 1e15 are 30,000 years, and a float still tells a quarter of one."""

Source = Literal["tap", "client", "replay", "sim"]
Status = Literal["ok", "error", "client_abort", "upstream_abort", "timeout"]
TokensSource = Literal["usage", "tokenizer", "estimate"]
HashSource = Literal["engine", "tokenizer", "bytes"]
OutputHashSource = Literal["engine", "tokenizer", "inferred", "text"]
"""``text`` is what version 0.1 wrote for ``tokenizer``."""
Continuation = Literal["exact", "altered"]
SessionSource = Literal["explicit", "inferred"]
HashAlgorithm = Literal["xxh3_64", "blake2b"]
TraceFormat = Literal[
    "kvtape",
    "mooncake",
]
"""Formats that can be read."""


class HashInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Origin of the trace's block hashes; never the key itself."""

    algorithm: str
    """``xxh3_64`` or ``blake2b`` for ours; an imported trace says what it knows (``mooncake``)."""
    key_id: str | None = None
    """Public name of the secret key: two traces' hashes are comparable only if it is the same. Null: no key."""
    branches: bool | None = None
    """True: records tell where their chains part within a block (``branch_tokens``). Null: to the block only."""
    extra: dict[str, Any] = {}
    """Unknown keys as they were read; written back beside the known ones."""


class Engine(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Facts of the engine from ``/version``, ``/metrics`` or flags. Null: not learnt."""

    name: str | None = None
    """``vllm``, ``sglang``, …"""
    version: str | None = None
    """As the engine reports it."""
    block_size: int | None = None
    """Tokens in one KV-cache block."""
    num_gpu_blocks: int | None = None
    """KV-cache blocks, the null block included (vLLM's ``num_gpu_blocks``)."""
    max_num_seqs: int | None = None
    """Sequences in one step at most."""
    max_num_batched_tokens: int | None = None
    """Tokens in one step at most."""
    max_model_len: int | None = None
    """Tokens in one sequence at most."""
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    """A step is composed while the one before runs."""
    gpus: int | None = None
    """GPUs that serve the model, as the user said (``--gpus``): divisor of throughput per GPU."""
    extra: dict[str, Any] = {}
    """Unknown keys as they were read; written back beside the known ones."""


class Workload(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Load of a writer that generates its own. Null: the writer generates none."""

    pattern: str | None = None
    """How arrivals were made: a pattern of loadgen's, closed loop, replay, or replay-sessions."""
    seed: int | None = None
    digest: str | None = None
    """SHA-256 over every planned request (arrival, shape, body): equal digests mean equal traffic."""
    nonce: str | None = None
    """What keeps this run's tokens apart from another run's; null: none, the same tokens every run."""
    speedup: float | None = None
    """Divisor of arrival offsets and think times; null: 1."""
    cold_prompts: bool | None = None
    """True: every request got tokens of its own, so that nothing is shared."""
    source_digest: str | None = None
    """``trace_digest`` of the trace that was replayed or simulated."""
    extra: dict[str, Any] = {}
    """Unknown keys as they were read; written back beside the known ones."""


class Meta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """A trace's header: who wrote it, with what blocks, hashes and clock, against which engine."""

    schema: str = msgspec.field(default=SCHEMA)
    source: Source | None = None
    """Who wrote it. Null: an importer could not tell."""
    model: str | None = None
    tokenizer: str | None = None
    """Where token ids came from: a tokenizer's name, ``ids`` (sent as ids), ``bytes`` (older traces)."""
    block_size: int | None = None
    """Tokens in one hashed block of this trace. Null: the trace has no hashes."""
    hash: HashInfo | None = None
    epoch_unix_ns: int | None = None
    """Wall clock (ns since 1970) at t = 0. Null: unknown, as in published traces."""
    engine: Engine | None = None
    workload: Workload | None = None
    extra: dict[str, Any] = {}
    """Every other key a writer kept; written back at the top level of the meta object."""


class Record(msgspec.Struct, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """A request: its shape, its sharing and its times, never its content."""

    request_id: RequestId
    """Unique within the trace; the same request keeps it through capture, replay and prediction."""
    session_id: SessionId | None = None
    """Keyed hash of the conversation's id, or an inferred one. Null: unknown."""
    session_source: SessionSource | None = None
    """explicit: the client named it; inferred: the hash chain told. Null: no session known."""
    parent_id: RequestId | None = None
    """The request whose answer this one continues. Null: a session's first, or unknown."""
    turn: Ordinal | None = None
    """1 for a session's first request. Null: unknown."""

    arrival_ms: Time | None = None
    """When the request reached the writer (tap: headers complete; client: first byte written)."""
    scheduled_ms: Time | None = None
    """When the plan wanted it sent. Null: no plan. Lag = arrival − scheduled."""
    held: bool | None = None
    """True: the concurrency limit queued it, so arrival − scheduled is no lag. Null: it did not wait for a slot."""
    first_byte_ms: Time | None = None
    """From arrival to the first response body byte. Null: none came."""
    ttft_ms: Time | None = None
    """From arrival to the first token. Null: none came, or the response was not streamed."""
    itl_ms: list[Time] = []
    """Gap before each later token-bearing read. Empty: at most one read carried tokens."""
    itl_tokens: list[int] = []
    """Tokens of each such read, parallel to ``itl_ms``; the first read's count is output − Σ."""
    e2e_ms: Time | None = None
    """From arrival to the end, however it ended."""

    status: Status = "ok"
    http_status: Count | None = None
    """Null: no response line came."""
    error: str | None = None
    """The error's kind (``connect_refused``, ``http_429`` …), never its text. Null: none.

    ``bad_response`` with status ok: the response was framed wrongly, and reached the client whole.
    """
    finish_reason: str | None = None
    """The engine's word: stop, length, …; of other APIs in the completions' words. Null: not said."""

    endpoint: str | None = None
    """Request path without its query, such as ``/v1/chat/completions``; words that may be ids are ``*``."""
    model: str | None = None
    stream: bool | None = None
    """A streamed answer was asked for."""
    max_tokens: Count | None = None
    """As the client asked; null: it did not."""
    priority: Word64 | None = None
    lora: str | None = None
    """Adapter's name where the model name selects one. Null: none."""
    tools: Count | None = None
    """How many tools were offered. Null: none."""
    n: Ordinal | None = None
    """Completions asked for. Null: one."""
    prompt_logprobs: bool | None = None
    """True: log probabilities of the prompt's tokens were asked for, so that vLLM and SGLang compute all of it: they
    look nothing up in the prefix cache. Null: not asked for."""
    upstream: str | None = None
    """The server that served it, as ``scheme://host:port`` without credentials. Null: none did."""
    headers: dict[str, str] | None = None
    """Request headers that the writer was told to keep, names in lower case. Null: none of them came."""
    injected: list[str] | None = None
    """What the writer itself added to the request (``usage``, ``token-ids``). Null: nothing."""

    prompt_tokens: Count | None = None
    planned_prompt_tokens: Count | None = None
    """Prompt tokens as the plan has them. Null: no plan, or only the engine can count them."""
    output_tokens: Count | None = None
    """Length of the answer, as far as it came. Null: unknown."""
    prompt_tokens_by_tokenizer: Count | None = None
    """Our own count of the prompt where it is not the engine's: the hashes are then of other tokens than those that it
    has. Null: the same, or one of the two is unknown."""
    cached_tokens: Count | None = None
    """Prompt tokens the engine took from its prefix cache. Null: not reported; 0: a miss."""
    queue_ms: Time | None = None
    """In the engine's queue, before the first step that served it. Null: not known."""
    preemptions: Count | None = None
    """How often the engine took its blocks away, to begin again later. Null: not known."""
    kv_blocks: Blocks | None = None
    """KV blocks it held at its end, of the engine's size. Null: not known, or it was aborted."""
    tokens_source: TokensSource | None = None
    """Where the counts come from. Null: there are none."""
    concurrency: Ordinal | None = None
    """Requests in flight at the writer at arrival, this one included."""

    block_hashes: list[BlockHash] | None = None
    """Chained hashes of the prompt's full blocks. Null: token ids unknown; []: shorter than a block."""
    output_block_hashes: list[BlockHash] | None = None
    """The chain continued over prompt + output: blocks ``prompt // B`` to ``(prompt + output − 1) // B`` exclusive,
    the full ones that hold an output token whose KV was computed. Null: output ids unknown."""
    branch_tokens: Count | None = None
    """Leading tokens of prompt and output that an earlier request has, too, where they end within a block. Null: they
    end with a block, or are not known to the token (``meta.hash.branches``)."""
    branch_hash: BlockHash | None = None
    """That request's block in which the two part: its hash, or a name for its unfilled last block. Null: no branch."""
    hashable_blocks: Count | None = None
    """How many leading blocks the chain is true for. Null: as many as ``block_hashes`` holds."""
    hash_source: HashSource | None = None
    """Whose token ids were hashed. Null: no hashes."""
    output_hash_source: OutputHashSource | None = None
    """Whose ids of the output: the engine's, or those of its text tokenized afresh; ``inferred``: a reader took the
    blocks from the next turn's prompt. Null: no output hashes."""
    think_ms: Time | None = None
    """Arrival minus the parent's end. Null: a session's first, or unknown."""
    continuation: Continuation | None = None
    """How the parent's prompt and output came back in this prompt: ``exact`` as they were, or ``altered`` (reasoning
    removed, other tokens for the same text). Null: no parent, or not known."""

    extra: dict[str, Any] = {}
    """Unknown fields as they were read; written back at the record's top level."""

    def context_tokens(self) -> int:
        """Return the tokens of prompt and output, unknown ones as 0: the context of a turn that continues it."""
        return (self.prompt_tokens or 0) + (self.output_tokens or 0)

    def chain(self) -> list[BlockHash]:
        """Return the hashes of the prompt's blocks, then of the output's; unknown ones are left out."""
        return [*(self.block_hashes or ()), *(self.output_block_hashes or ())]

    def end_ms(self) -> float | None:
        """Return the request's end on the trace's clock; null if either time is unknown."""
        if self.arrival_ms is None or self.e2e_ms is None:
            return None
        return self.arrival_ms + self.e2e_ms
