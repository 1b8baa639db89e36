"""Trace schema: shape, block hashes and times of each request, without content.

A trace is JSON Lines: first ``{"meta": {...}}``, then one record per line in finish order. Field names follow vllm-vcr
where it has the field. Every time is a float in milliseconds on one monotonic clock; its zero is
``Meta.epoch_unix_ns``. An absent field equals null; null never means zero.
"""

from typing import Annotated, Any, Literal, NewType

import msgspec

SCHEMA = "kvtape/1"

BlockHash = NewType("BlockHash", int)
"""Chained, keyed 64-bit hash of a prompt's tokens up to the end of a full block."""
RequestId = NewType("RequestId", str)
SessionId = NewType("SessionId", str)

MOST_TOKENS = 1 << 24
"""Maximum tokens of a prompt, output or block: about ten times the longest served context."""
MAX_REPORTED = 10**15
"""Maximum of a number that an engine reports."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Ordinal = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
Blocks = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Word64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Time = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""Milliseconds: 1e15 are 30,000 years, and a float still resolves 0.25 ms."""

Source = Literal["tap", "client", "replay", "sim"]
Status = Literal["ok", "error", "client_abort", "upstream_abort", "timeout"]
TokensSource = Literal["usage", "tokenizer", "estimate"]
HashSource = Literal["engine", "tokenizer", "bytes"]
OutputHashSource = Literal["engine", "tokenizer", "inferred", "text"]
"""``text``: written by version 0.1 for ``tokenizer``."""
Continuation = Literal["exact", "altered"]
SessionSource = Literal["explicit", "inferred"]
HashAlgorithm = Literal["xxh3_64", "blake2b"]
TraceFormat = Literal[
    "kvtape",
    "mooncake",
]
"""Formats that can be read."""


class HashInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Origin of the block hashes, without the key."""

    algorithm: str
    """``xxh3_64`` or ``blake2b``; the format's name for imported traces (``mooncake``)."""
    key_id: str | None = None
    """Public name of the secret key: hashes of two traces are comparable only if it is equal. Null: no key."""
    branches: bool | None = None
    """True: records have shared prefixes to the token (``branch_tokens``). Null: to the block only."""
    extra: dict[str, Any] = {}
    """Unknown keys; written back beside the known keys."""


class Engine(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Engine settings from ``/version``, ``/metrics`` or flags. Null: unknown."""

    name: str | None = None
    """``vllm``, ``sglang``, …"""
    version: str | None = None
    """Version that the engine reports."""
    block_size: int | None = None
    """Tokens in one KV-cache block."""
    num_gpu_blocks: int | None = None
    """KV-cache blocks, the null block included (vLLM's ``num_gpu_blocks``)."""
    max_num_seqs: int | None = None
    """Maximum sequences in a scheduler step."""
    max_num_batched_tokens: int | None = None
    """Maximum tokens in a scheduler step."""
    max_model_len: int | None = None
    """Maximum tokens of a sequence."""
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    """The scheduler prepares a step while the previous step runs."""
    gpus: int | None = None
    """Number of GPUs that serve the model (``--gpus``): divisor of throughput per GPU."""
    extra: dict[str, Any] = {}
    """Unknown keys; written back beside the known keys."""


class Workload(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Load that the writer generated. Null: the writer generated no load."""

    pattern: str | None = None
    """Arrival pattern: a pattern of loadgen, closed loop, replay, or replay-sessions."""
    seed: int | None = None
    digest: str | None = None
    """SHA-256 over every planned request (arrival, shape, body): equal digests mean equal traffic."""
    nonce: str | None = None
    """Text that makes the prompt tokens of a run unique. Null: the same tokens in every run."""
    speedup: float | None = None
    """Divisor of arrival offsets and think times; null: 1."""
    cold_prompts: bool | None = None
    """True: every request has unique tokens, so that there are no prefix hits."""
    source_digest: str | None = None
    """``trace_digest`` of the replayed or simulated trace."""
    extra: dict[str, Any] = {}
    """Unknown keys; written back beside the known keys."""


class Meta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """Header of a trace: writer, block size, hashes, clock and engine."""

    schema: str = msgspec.field(default=SCHEMA)
    source: Source | None = None
    """Program that wrote the trace. Null: imported."""
    model: str | None = None
    tokenizer: str | None = None
    """Source of token ids: a tokenizer's name, ``ids`` (sent as ids), ``bytes`` (older traces)."""
    block_size: int | None = None
    """Tokens in a hashed block of this trace. Null: the trace has no hashes."""
    hash: HashInfo | None = None
    epoch_unix_ns: int | None = None
    """Wall clock (ns since 1970) at t = 0. Null: unknown, as in published traces."""
    engine: Engine | None = None
    workload: Workload | None = None
    extra: dict[str, Any] = {}
    """Unknown keys; written back at the top level of the meta object."""


class Record(msgspec.Struct, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """A request: tokens, block hashes, session and times, never content."""

    request_id: RequestId
    """Unique within the trace; equal for the same request in capture, replay and prediction."""
    session_id: SessionId | None = None
    """Keyed hash of the conversation's id, or an inferred id. Null: unknown."""
    session_source: SessionSource | None = None
    """explicit: the client sent a session id; inferred: from the hash chain. Null: no session."""
    parent_id: RequestId | None = None
    """Request whose output this request continues. Null: first turn, or unknown."""
    turn: Ordinal | None = None
    """Turn within the session, from 1. Null: unknown."""

    arrival_ms: Time | None = None
    """Arrival of the request at the writer (tap: headers complete; client: first byte written)."""
    scheduled_ms: Time | None = None
    """Planned send time. Null: no plan. Send lag = arrival − scheduled."""
    held: bool | None = None
    """True: the concurrency limit delayed it, so arrival − scheduled is no send lag. Null: not delayed."""
    first_byte_ms: Time | None = None
    """Latency from arrival to the first byte of the response body. Null: no byte."""
    ttft_ms: Time | None = None
    """TTFT: latency from arrival to the first token. Null: no token, or the response was not streamed."""
    itl_ms: list[Time] = []
    """ITL: latency before each later read with tokens. Empty: at most one read had tokens."""
    itl_tokens: list[int] = []
    """Tokens of each read in ``itl_ms``; the first read has ``output_tokens`` − Σ tokens."""
    e2e_ms: Time | None = None
    """E2E latency: from arrival to the end, with any status."""

    status: Status = "ok"
    http_status: Count | None = None
    """Null: no response line."""
    error: str | None = None
    """Kind of error (``connect_refused``, ``http_429`` …), never its text. Null: none.

    ``bad_response`` with status ok: the response had invalid framing, and reached the client completely.
    """
    finish_reason: str | None = None
    """stop, length, …; values of other APIs are converted to those of completions. Null: not reported."""

    endpoint: str | None = None
    """Request path without query, such as ``/v1/chat/completions``; parts that may be ids are ``*``."""
    model: str | None = None
    stream: bool | None = None
    """The request has ``stream``: a streamed response."""
    max_tokens: Count | None = None
    """Requested limit of output tokens. Null: not requested."""
    priority: Word64 | None = None
    lora: str | None = None
    """Name of the LoRA adapter that the model name selects. Null: none."""
    tools: Count | None = None
    """Number of tools in the request. Null: none."""
    n: Ordinal | None = None
    """Requested completions. Null: 1."""
    prompt_logprobs: bool | None = None
    """True: the request has ``prompt_logprobs``, log probabilities of prompt tokens. vLLM and SGLang skip the prefix
    cache and compute the complete prompt. Null: not requested."""
    upstream: str | None = None
    """Server of the request, as ``scheme://host:port`` without credentials. Null: none."""
    headers: dict[str, str] | None = None
    """Request headers that the writer was configured to record, names in lower case. Null: none was present."""
    injected: list[str] | None = None
    """Additions of the writer to the request (``usage``, ``token-ids``). Null: none."""

    prompt_tokens: Count | None = None
    planned_prompt_tokens: Count | None = None
    """Planned prompt tokens. Null: no plan, or only the engine can count them."""
    output_tokens: Count | None = None
    """Output tokens received. Null: unknown."""
    prompt_tokens_by_tokenizer: Count | None = None
    """The tokenizer's count of prompt tokens if it differs from the engine's: the hashes are then of other tokens than
    the engine's. Null: equal, or one of the two is unknown."""
    cached_tokens: Count | None = None
    """Prefix hit: prompt tokens that the engine got from its prefix cache. Null: not reported; 0: a miss."""
    queue_ms: Time | None = None
    """Time in the engine's queue, before the first scheduler step of the request. Null: unknown."""
    preemptions: Count | None = None
    """Number of preemptions of the request. Null: unknown."""
    kv_blocks: Blocks | None = None
    """KV cache blocks of the request at its end, of the engine's block size. Null: unknown, or aborted."""
    tokens_source: TokensSource | None = None
    """Source of the token counts. Null: no counts."""
    concurrency: Ordinal | None = None
    """Requests in flight at the writer at arrival, this request included."""

    block_hashes: list[BlockHash] | None = None
    """Chained hashes of the prompt's full blocks. Null: token ids unknown; []: prompt shorter than a block."""
    output_block_hashes: list[BlockHash] | None = None
    """Chained hashes of the blocks from ``prompt // B`` to ``(prompt + output − 1) // B`` exclusive: full blocks with
    an output token whose KV was computed. Null: output token ids unknown."""
    branch_tokens: Count | None = None
    """Length in tokens of the prefix shared with an earlier request, if the prefix ends within a block. Null: it ends
    with a block, or is not known to the token (``meta.hash.branches``)."""
    branch_hash: BlockHash | None = None
    """Block of the earlier request in which the two diverge: a hash, or a partial block's id. Null: no branch."""
    hashable_blocks: Count | None = None
    """Number of leading blocks with valid hashes. Null: all of ``block_hashes``."""
    hash_source: HashSource | None = None
    """Source of the hashed token ids. Null: no hashes."""
    output_hash_source: OutputHashSource | None = None
    """Source of the output token ids: the engine, or the output text tokenized again; ``inferred``: a reader copied the
    blocks from the next turn's prompt. Null: no output hashes."""
    think_ms: Time | None = None
    """Think time: arrival minus the parent's end. Null: first turn, or unknown."""
    continuation: Continuation | None = None
    """Match of this prompt with the parent's prompt and output: ``exact``, or ``altered`` (reasoning removed, other
    tokens for the same text). Null: no parent, or unknown."""

    extra: dict[str, Any] = {}
    """Unknown fields; written back at the top level of the record."""

    def context_tokens(self) -> int:
        """Return the prompt tokens plus output tokens, unknown counts as 0: the context of the next turn."""
        return (self.prompt_tokens or 0) + (self.output_tokens or 0)

    def chain(self) -> list[BlockHash]:
        """Return the block hashes of prompt and output; unknown hashes are omitted."""
        return [*(self.block_hashes or ()), *(self.output_block_hashes or ())]

    def end_ms(self) -> float | None:
        """Return the end of the request on the trace's clock; None if a time is unknown."""
        if self.arrival_ms is None or self.e2e_ms is None:
            return None
        return self.arrival_ms + self.e2e_ms
