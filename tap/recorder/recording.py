"""Builds a record from an exchange: shape, token counts, TTFT, ITL, block hashes (first token: ``wire.completion``)."""

import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from engines.dialect import DialectName
from tap.ipc.messages import CapturedExchange, Endpoint
from tap.prompts.chatmessages import UntokenizableError
from tap.prompts.prompt import ChainStart, HashedPrompt, PromptHasher
from tap.prompts.shape import RequestShape, UnreadableBodyError, explicit_session, read_shape
from tap.recorder.contentcoding import UndecodableError, decode_reads
from tracefile.hashing.blockhash import HashKey, keyed_id
from tracefile.records.errors import InputError
from tracefile.records.schema import MOST_TOKENS, OutputHashSource, Record, RequestId, SessionId
from wire.answer import GENERATING, parse_answer
from wire.completion import Completion
from wire.jsonsize import fits_in_memory

CHATS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
"""Endpoints whose prompts are rendered by a chat template."""


def endpoint_of(exchange: CapturedExchange) -> Endpoint:
    """Return the endpoint by the response: llama.cpp serves its native API at ``/completions``, with ``id_slot``."""
    if exchange.endpoint == "/v1/completions" and exchange.response_reads:
        first = exchange.response_reads[0][1]
        if b'"id_slot":' in first and b'"choices":' not in first:
            return "/completion"
    return exchange.endpoint


def read_completion(exchange: CapturedExchange, *, stream_requested: bool, max_bytes: int) -> Completion | None:
    """Return the parsed response; None: no response. ``stream_requested``: fallback without ``Content-Type``."""
    if exchange.http_status is None:
        return None
    content_type = exchange.response_headers.get("content-type", "").lower()
    if exchange.endpoint not in GENERATING and "json" not in content_type:
        return Completion(done=True)  # audio or a file: no tokens
    stream = content_type.startswith("text/event-stream") if content_type else stream_requested
    try:
        reads = decode_reads(exchange.response_reads, exchange.response_headers.get("content-encoding"), max_bytes)
    except UndecodableError:
        return None
    if not exchange.response_complete:
        completion = _cut_stream(exchange, reads) if stream else Completion(done=True)
    elif stream:
        completion = parse_answer(exchange.endpoint, reads, stream=True)
    else:
        completion = _parse_complete(exchange.endpoint, reads)
    if exchange.endpoint not in GENERATING and completion.error_kind == "unparseable":
        return Completion(done=True)
    return completion


def _cut_stream(exchange: CapturedExchange, reads: Sequence[tuple[int, bytes]]) -> Completion:
    """Parse a stream beyond the capture limit: TTFT from its beginning, usage and finish reason from its last reads."""
    beginning = parse_answer(exchange.endpoint, reads, stream=True)
    end = parse_answer(exchange.endpoint, exchange.last_reads, stream=True)
    return Completion(
        first_token_ns=beginning.first_token_ns,
        # Anthropic sends the prompt tokens at the start.
        prompt_tokens=beginning.prompt_tokens if end.prompt_tokens is None else end.prompt_tokens,
        output_tokens=end.output_tokens,
        cached_tokens=beginning.cached_tokens if end.cached_tokens is None else end.cached_tokens,
        finish_reason=end.finish_reason,
        prompt_token_ids=beginning.prompt_token_ids,
        # The last event repeats the complete output, and may start before the last reads.
        done=end.done or exchange.endpoint == "/v1/responses",
    )


def _parse_complete(endpoint: str, reads: Sequence[tuple[int, bytes]]) -> Completion:
    body = reads[0][1] if len(reads) == 1 else b"".join(data for _, data in reads)
    return parse_answer(endpoint, [(0, body)], stream=False) if fits_in_memory(body) else Completion(done=True)


FINISH_REASONS = frozenset(
    {"stop", "length", "tool_calls", "function_call", "content_filter", "abort", "error", "timeout", "repetition"}
    | {"eos", "eos_token", "stop_sequence", "end_turn", "tool_use", "max_tokens", "pause_turn", "refusal", "limit"}
    | {"failed", "cancelled", "incomplete", "insufficient_system_resource"}
)
"""Finish reasons of engines and gateways. Any other value is recorded as ``other``, since it could be any text."""
MAX_HEADER_CHARS = 1_000
SHAPE_FIELDS = tuple(name for name in RequestShape.__struct_fields__ if name in Record.__struct_fields__)
REMEMBERED_IDS = 100_000
"""Last request ids that are compared to detect a client's repeated id."""


class RecordResult(NamedTuple):
    """A record with its hashing result for the account and its prompt token ids."""

    record: Record
    unhashed: str | None
    """Reason for missing block hashes. None: the record has hashes."""
    prompt_count_matches: bool | None
    """True if the tap's prompt tokens equal the engine's usage. None: one of the counts is unknown."""
    chat_ids: Sequence[int] | None = None
    """Token ids of a chat prompt, generation prompt included. None: unknown, or no chat."""


@dataclass
class RecordBuilder:
    """Builds the records of a trace from exchanges; keeps request ids unique within the trace."""

    key: HashKey
    prompts: PromptHasher
    _: KW_ONLY
    epoch_ns: int
    hash_model: str | None
    loras: Collection[str] = ()
    keep_headers: Sequence[str] = ()
    dialect: DialectName = "vllm"
    max_body_bytes: int = 16 << 20
    """Limit of decoded bodies, equal to the capture limit."""

    def __post_init__(self) -> None:
        self._hits_reported = False
        """True: the engine has reported cached tokens, so that a missing count means 0."""
        self._ids: OrderedDict[RequestId, None] = OrderedDict()
        self._id_prefix = secrets.token_hex(6)
        """Prefix of generated request ids, different for each recorder."""
        self._unnamed = 0

    def build(self, exchange: CapturedExchange) -> RecordResult:
        exchange.endpoint = endpoint_of(exchange)
        shape, unreadable = _shape(exchange, self.max_body_bytes)
        stream_requested = shape is not None and shape.stream
        completion = read_completion(exchange, stream_requested=stream_requested, max_bytes=self.max_body_bytes)
        record = Record(request_id=self._request_id(exchange))
        if completion is not None:
            _refuse_usage(completion)
        _fill_times(record, exchange, completion, self.epoch_ns)
        _fill_outcome(record, exchange, completion)
        _fill_counts(record, exchange, completion)
        self._fill_misses(record)
        self._fill_relay(record, exchange)
        if shape is not None:
            for name in SHAPE_FIELDS:
                setattr(record, name, getattr(shape, name))
            record.lora = shape.model if shape.model in self.loras else None
        session = explicit_session(exchange.request_headers, shape)
        if session is not None:
            record.session_id = SessionId(keyed_id(self.key, "session", session))
            record.session_source = "explicit"
        if shape is None:
            return RecordResult(record, unhashed=unreadable, prompt_count_matches=None)
        self.prompts.served_by(exchange.upstream)
        return self._hash(record, shape, completion)

    def _request_id(self, exchange: CapturedExchange) -> RequestId:
        client_id = exchange.request_headers.get("x-request-id")
        if not client_id:
            self._unnamed += 1
            return RequestId(f"{self._id_prefix}{self._unnamed:012x}")
        request_id = RequestId(keyed_id(self.key, "request", client_id))
        if request_id in self._ids:
            return RequestId(f"{request_id}-{secrets.token_hex(4)}")
        self.remember(request_id)
        return request_id

    def remember(self, request_id: RequestId) -> None:
        self._ids[request_id] = None
        if len(self._ids) > REMEMBERED_IDS:
            self._ids.popitem(last=False)

    def _fill_relay(self, record: Record, exchange: CapturedExchange) -> None:
        headers = exchange.request_headers
        if self.keep_headers:
            values = {name: headers[name][:MAX_HEADER_CHARS] for name in self.keep_headers if name in headers}
            record.headers = values or None
        record.upstream = exchange.upstream or None
        if exchange.injected:
            record.injected = list(exchange.injected)

    def _fill_misses(self, record: Record) -> None:
        """Fill in 0 cached tokens for SGLang, which omits 0, and omits all counts without --enable-cache-report."""
        if record.cached_tokens is not None:
            self._hits_reported = True
        elif self.dialect == "sglang" and self._hits_reported and record.tokens_source == "usage":
            record.cached_tokens = 0

    def _hash(self, record: Record, shape: RequestShape, completion: Completion | None) -> RecordResult:
        usage_tokens = record.prompt_tokens
        model = self.hash_model or shape.model or ""
        start = ChainStart(model, record.lora, shape.cache_salt)
        engine_ids = completion.prompt_token_ids if completion is not None else None
        try:
            prompt = self.prompts.hash_prompt(shape, start, engine_ids or None)
        except Exception as error:  # a tokenizer may raise anything; the record stays, without block hashes
            prompt = HashedPrompt(unhashed=f"tokenizer_failed:{type(error).__name__}")
        _fill_prompt(record, prompt, self.prompts.block_size)
        output_ids: Sequence[int] = ()
        if completion is not None and prompt.hashes is not None:
            output_ids = self._fill_output_hashes(record, start, prompt, completion)
        if prompt.token_count == record.prompt_tokens:
            self._fill_branch(record, start, prompt, output_ids)
        comparable = usage_tokens is not None and prompt.token_count is not None
        matches = usage_tokens == prompt.token_count if comparable else None
        is_chat = shape.endpoint in CHATS and shape.body.get("add_generation_prompt") is not False
        ids = prompt.token_ids if is_chat and prompt.token_count == record.prompt_tokens else None
        return RecordResult(record, prompt.unhashed, matches, ids)

    def _fill_branch(self, record: Record, start: ChainStart, prompt: HashedPrompt, output_ids: Sequence[int]) -> None:
        if record.block_hashes is None or record.hashable_blocks is not None:
            return
        chain = record.chain()
        branch = self.prompts.branch(start, prompt, chain, output_ids, record.request_id)
        if branch is not None:
            record.branch_tokens, record.branch_hash = branch.tokens, branch.block

    def _fill_output_hashes(
        self, record: Record, start: ChainStart, prompt: HashedPrompt, completion: Completion
    ) -> Sequence[int]:
        """Fill in output block hashes from the engine's or the tokenizer's ids, if both token counts equal the usage.

        Return the hashed token ids. In a chat the hash chain ends with the output: text that the chat template appends
        belongs to the next turn's prompt.
        """
        if record.n is not None or record.output_tokens is None or prompt.token_count != record.prompt_tokens:
            return ()
        source: OutputHashSource = "engine"
        ids: Sequence[int] | None = completion.token_ids
        if ids is None and completion.text and record.tokens_source == "usage":
            source, ids = "tokenizer", self._text_ids(completion, record.output_tokens)
        if ids is None or len(ids) != record.output_tokens:
            return ()
        with contextlib.suppress(InputError):  # invalid token ids of an engine are not hashed
            record.output_block_hashes = self.prompts.output_hashes(start, prompt, ids)
        record.output_hash_source = None if record.output_block_hashes is None else source
        return () if record.output_block_hashes is None else ids

    def _text_ids(self, completion: Completion, output_tokens: int) -> Sequence[int] | None:
        try:
            ids = self.prompts.output_ids(completion.text)
        except UntokenizableError:
            return None
        if ids is not None and len(ids) + 1 == output_tokens and completion.finish_reason == "stop":
            # The stop token has no text. Its id does not matter: the KV of the last token is never computed.
            return [*ids, 0]
        return ids


def _shape(exchange: CapturedExchange, max_bytes: int) -> tuple[RequestShape | None, str | None]:
    if exchange.request_body is None:
        return None, "request_larger_than_the_copy"
    try:
        body = b"".join(exchange.request_body)
        coding = exchange.request_headers.get("content-encoding")
        if coding is not None:
            body = b"".join(data for _, data in decode_reads([(0, body)], coding, max_bytes))
        return read_shape(exchange.endpoint, body), None
    except UndecodableError:
        return None, "request_encoding"
    except UnreadableBodyError as error:
        return None, error.reason


def _fill_times(record: Record, exchange: CapturedExchange, completion: Completion | None, epoch_ns: int) -> None:
    """Fill in E2E latency, TTFT and ITL. TTFT: first token's arrival (``first_token_ns``) - request's arrival."""
    record.arrival_ms = (exchange.arrival_ns - epoch_ns) / 1e6
    record.e2e_ms = (exchange.end_ns - exchange.arrival_ns) / 1e6
    if exchange.response_reads:
        record.first_byte_ms = (exchange.response_reads[0][0] - exchange.arrival_ns) / 1e6
    if completion is None or completion.first_token_ns is None:
        return
    record.ttft_ms = (completion.first_token_ns - exchange.arrival_ns) / 1e6
    record.itl_ms = [gap / 1e6 for gap in completion.gaps_ns]
    record.itl_tokens = list(completion.gap_tokens)


def _fill_outcome(record: Record, exchange: CapturedExchange, completion: Completion | None) -> None:
    record.endpoint = exchange.endpoint
    record.concurrency = exchange.concurrency
    record.http_status = exchange.http_status
    record.status = exchange.outcome
    record.error = exchange.error_kind
    ended = completion is not None and completion.done and completion.first_token_ns is not None
    if exchange.outcome == "client_abort" and ended:
        # OpenAI's client closes at ``[DONE]``, before the last chunk of the body: the response was complete.
        record.status, record.error = "ok", None
    if exchange.outcome == "ok" and exchange.http_status is not None and exchange.http_status >= 400:
        record.status, record.error = "error", f"http_{exchange.http_status}"
    elif exchange.outcome == "ok" and completion is not None and completion.error_kind is not None:
        record.status, record.error = "error", completion.error_kind
    elif (
        exchange.outcome == "ok" and completion is not None and not completion.done and completion.finish_reason is None
    ):
        record.status, record.error = "error", "response_incomplete"
    if completion is not None:
        reason = completion.finish_reason
        record.finish_reason = reason if reason is None or reason in FINISH_REASONS else "other"


def _fill_counts(record: Record, exchange: CapturedExchange, completion: Completion | None) -> None:
    """Fill in token counts from the engine's usage, else from the tokens counted in the stream."""
    if completion is None or record.http_status is None or record.http_status >= 400:
        return
    record.prompt_tokens = completion.prompt_tokens
    record.cached_tokens = completion.cached_tokens
    record.output_tokens = completion.output_tokens
    if completion.output_tokens is None and exchange.response_complete and completion.first_token_ns is not None:
        record.output_tokens = completion.streamed_tokens
        record.tokens_source = "estimate"
    if completion.prompt_tokens is not None:
        record.tokens_source = "usage"


def _refuse_usage(completion: Completion) -> None:
    """Remove token counts that no engine can reach: readers allocate memory and divide by these counts."""
    if completion.prompt_tokens is not None and completion.prompt_tokens > MOST_TOKENS:
        completion.prompt_tokens = None
    if completion.output_tokens is not None and completion.output_tokens > MOST_TOKENS:
        completion.output_tokens = None
        completion.first_tokens, completion.gap_tokens = 1, [1] * len(completion.gap_tokens)
    most_cached = MOST_TOKENS if completion.prompt_tokens is None else completion.prompt_tokens
    if completion.cached_tokens is not None and completion.cached_tokens > most_cached:
        completion.cached_tokens = None


def _fill_prompt(record: Record, prompt: HashedPrompt, block_size: int) -> None:
    """Fill in the block hashes, and the prompt tokens if the engine did not report them."""
    record.block_hashes = prompt.hashes
    record.hash_source = prompt.source
    if record.prompt_tokens is None and prompt.token_count is not None:
        record.prompt_tokens = prompt.token_count
        record.tokens_source = "tokenizer"
    if (record.cached_tokens or 0) > (MOST_TOKENS if record.prompt_tokens is None else record.prompt_tokens):
        record.cached_tokens = None
    if prompt.hashes is None or record.prompt_tokens is None:
        return
    full_blocks = record.prompt_tokens // block_size
    if prompt.token_count is not None and prompt.token_count != record.prompt_tokens:
        record.prompt_tokens_by_tokenizer = prompt.token_count
    record.block_hashes = prompt.hashes[:full_blocks]
    if len(record.block_hashes) < full_blocks:
        record.hashable_blocks = len(record.block_hashes)
