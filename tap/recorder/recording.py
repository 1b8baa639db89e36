"""From a finished exchange to a record: shape, counts, hashes and times, without content."""

import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from engines.dialect import DialectName
from tap.ipc.messages import Endpoint, ExchangeCopy
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
"""APIs whose prompts a chat template makes."""


def endpoint_of(exchange: ExchangeCopy) -> Endpoint:
    """Return the API of a response: at ``/completions``, llama.cpp speaks its own, which names its slot."""
    if exchange.endpoint == "/v1/completions" and exchange.response_reads:
        first = exchange.response_reads[0][1]
        if b'"id_slot":' in first and b'"choices":' not in first:
            return "/completion"
    return exchange.endpoint


def read_answer(exchange: ExchangeCopy, *, asked_stream: bool, max_bytes: int) -> Completion | None:
    """Return the content of the response, null for none; ``asked_stream`` is for one without ``Content-Type``."""
    if exchange.http_status is None:
        return None
    content_type = exchange.response_headers.get("content-type", "").lower()
    if exchange.endpoint not in GENERATING and "json" not in content_type:
        return Completion(done=True)  # audio, a file: no tokens in it
    stream = content_type.startswith("text/event-stream") if content_type else asked_stream
    try:
        reads = decode_reads(exchange.response_reads, exchange.response_headers.get("content-encoding"), max_bytes)
    except UndecodableError:
        return None
    if not exchange.response_whole:
        answer = _cut_stream(exchange, reads) if stream else Completion(done=True)
    elif stream:
        answer = parse_answer(exchange.endpoint, reads, stream=True)
    else:
        answer = _whole(exchange.endpoint, reads)
    if exchange.endpoint not in GENERATING and answer.error_kind == "unparseable":
        return Completion(done=True)
    return answer


def _cut_stream(exchange: ExchangeCopy, reads: Sequence[tuple[int, bytes]]) -> Completion:
    """Read a stream larger than the copy: TTFT from its beginning, usage and finish from its last reads."""
    beginning = parse_answer(exchange.endpoint, reads, stream=True)
    end = parse_answer(exchange.endpoint, exchange.last_reads, stream=True)
    return Completion(
        first_token_ns=beginning.first_token_ns,
        # Anthropic sends the prompt's length at the start.
        prompt_tokens=beginning.prompt_tokens if end.prompt_tokens is None else end.prompt_tokens,
        output_tokens=end.output_tokens,
        cached_tokens=beginning.cached_tokens if end.cached_tokens is None else end.cached_tokens,
        finish_reason=end.finish_reason,
        prompt_token_ids=beginning.prompt_token_ids,
        # A last event that repeats the whole output may begin before the kept reads.
        done=end.done or exchange.endpoint == "/v1/responses",
    )


def _whole(endpoint: str, reads: Sequence[tuple[int, bytes]]) -> Completion:
    body = reads[0][1] if len(reads) == 1 else b"".join(data for _, data in reads)
    return parse_answer(endpoint, [(0, body)], stream=False) if fits_in_memory(body) else Completion(done=True)


FINISH_REASONS = frozenset(
    {"stop", "length", "tool_calls", "function_call", "content_filter", "abort", "error", "timeout", "repetition"}
    | {"eos", "eos_token", "stop_sequence", "end_turn", "tool_use", "max_tokens", "pause_turn", "refusal", "limit"}
    | {"failed", "cancelled", "incomplete", "insufficient_system_resource"}
)
"""Words of engines and gateways. Any other is ``other``: it could be any text."""
MAX_HEADER_CHARS = 1_000
SHAPE_FIELDS = tuple(name for name in RequestShape.__struct_fields__ if name in Record.__struct_fields__)
REMEMBERED_IDS = 100_000
"""Request ids kept to notice an id that a client uses twice."""


class MadeRecord(NamedTuple):
    """A record with its part of the trace's summary."""

    record: Record
    unhashed: str | None
    """Reason for no hashes. Null: it has hashes."""
    prompt_count_matches: bool | None
    """True if the number of our prompt ids is the engine's usage. Null: one of the two is unknown."""
    chat_ids: Sequence[int] | None = None
    """Token ids of a chat's prompt, which ends with those that begin the answer. Null: unknown, or no chat."""


@dataclass
class RecordMaker:
    """Maker of a trace's records; keeps request ids unique within the trace."""

    key: HashKey
    prompts: PromptHasher
    _: KW_ONLY
    epoch_ns: int
    hash_model: str | None
    loras: Collection[str] = ()
    keep_headers: Sequence[str] = ()
    dialect: DialectName = "vllm"
    max_body_bytes: int = 16 << 20
    """Bound for decoded bodies, as for those that are copied."""

    def __post_init__(self) -> None:
        self._hits_reported = False
        """The engine has reported cached tokens: a missing count is 0 from then on."""
        self._ids: OrderedDict[RequestId, None] = OrderedDict()
        self._id_prefix = secrets.token_hex(6)
        """Prefix of ids for requests without one, different for each recorder."""
        self._unnamed = 0

    def make(self, exchange: ExchangeCopy) -> MadeRecord:
        exchange.endpoint = endpoint_of(exchange)
        shape, unreadable = _shape(exchange, self.max_body_bytes)
        asked_stream = shape is not None and shape.stream
        answer = read_answer(exchange, asked_stream=asked_stream, max_bytes=self.max_body_bytes)
        record = Record(request_id=self._request_id(exchange))
        if answer is not None:
            _refuse_usage(answer)
        _fill_times(record, exchange, answer, self.epoch_ns)
        _fill_outcome(record, exchange, answer)
        _fill_counts(record, exchange, answer)
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
            return MadeRecord(record, unhashed=unreadable, prompt_count_matches=None)
        self.prompts.served_by(exchange.upstream)
        return self._hash(record, shape, answer)

    def _request_id(self, exchange: ExchangeCopy) -> RequestId:
        named = exchange.request_headers.get("x-request-id")
        if not named:
            self._unnamed += 1
            return RequestId(f"{self._id_prefix}{self._unnamed:012x}")
        found = RequestId(keyed_id(self.key, "request", named))
        if found in self._ids:
            return RequestId(f"{found}-{secrets.token_hex(4)}")
        self.remember(found)
        return found

    def remember(self, request_id: RequestId) -> None:
        self._ids[request_id] = None
        if len(self._ids) > REMEMBERED_IDS:
            self._ids.popitem(last=False)

    def _fill_relay(self, record: Record, exchange: ExchangeCopy) -> None:
        headers = exchange.request_headers
        if self.keep_headers:
            kept = {name: headers[name][:MAX_HEADER_CHARS] for name in self.keep_headers if name in headers}
            record.headers = kept or None
        record.upstream = exchange.upstream or None
        if exchange.injected:
            record.injected = list(exchange.injected)

    def _fill_misses(self, record: Record) -> None:
        """Fill in 0 for SGLang, which omits a count of 0, and every count unless told to report."""
        if record.cached_tokens is not None:
            self._hits_reported = True
        elif self.dialect == "sglang" and self._hits_reported and record.tokens_source == "usage":
            record.cached_tokens = 0

    def _hash(self, record: Record, shape: RequestShape, answer: Completion | None) -> MadeRecord:
        usage_tokens = record.prompt_tokens
        model = self.hash_model or shape.model or ""
        start = ChainStart(model, record.lora, shape.cache_salt)
        engine_ids = answer.prompt_token_ids if answer is not None else None
        try:
            prompt = self.prompts.hash_prompt(shape, start, engine_ids or None)
        except Exception as error:  # a tokenizer may fail in any way; the record remains without hashes
            prompt = HashedPrompt(unhashed=f"tokenizer_failed:{type(error).__name__}")
        _fill_prompt(record, prompt, self.prompts.block_size)
        output_ids: Sequence[int] = ()
        if answer is not None and prompt.hashes is not None:
            output_ids = self._fill_output_hashes(record, start, prompt, answer)
        if prompt.token_count == record.prompt_tokens:
            self._fill_branch(record, start, prompt, output_ids)
        known = usage_tokens is not None and prompt.token_count is not None
        matches = usage_tokens == prompt.token_count if known else None
        is_chat = shape.endpoint in CHATS and shape.body.get("add_generation_prompt") is not False
        ids = prompt.token_ids if is_chat and prompt.token_count == record.prompt_tokens else None
        return MadeRecord(record, prompt.unhashed, matches, ids)

    def _fill_branch(self, record: Record, start: ChainStart, prompt: HashedPrompt, output_ids: Sequence[int]) -> None:
        if record.block_hashes is None or record.hashable_blocks is not None:
            return
        chain = record.chain()
        branch = self.prompts.branch(start, prompt, chain, output_ids, record.request_id)
        if branch is not None:
            record.branch_tokens, record.branch_hash = branch.tokens, branch.block

    def _fill_output_hashes(
        self, record: Record, start: ChainStart, prompt: HashedPrompt, answer: Completion
    ) -> Sequence[int]:
        """Fill in output hashes from the engine's ids, else the text's ids, if both lengths are those of the usage.

        Return the hashed ids. In a chat the chain ends with the output: the text that the template adds belongs to the
        next turn's prompt.
        """
        if record.n is not None or record.output_tokens is None or prompt.token_count != record.prompt_tokens:
            return ()
        source: OutputHashSource = "engine"
        ids: Sequence[int] | None = answer.token_ids
        if ids is None and answer.text and record.tokens_source == "usage":
            source, ids = "tokenizer", self._text_ids(answer, record.output_tokens)
        if ids is None or len(ids) != record.output_tokens:
            return ()
        with contextlib.suppress(InputError):  # invalid ids of an engine have no hashes
            record.output_block_hashes = self.prompts.output_hashes(start, prompt, ids)
        record.output_hash_source = None if record.output_block_hashes is None else source
        return () if record.output_block_hashes is None else ids

    def _text_ids(self, answer: Completion, output_tokens: int) -> Sequence[int] | None:
        try:
            ids = self.prompts.output_ids(answer.text)
        except UntokenizableError:
            return None
        if ids is not None and len(ids) + 1 == output_tokens and answer.finish_reason == "stop":
            # The stop token has no text, and its id does not matter: the last token's KV is never computed.
            return [*ids, 0]
        return ids


def _shape(exchange: ExchangeCopy, max_bytes: int) -> tuple[RequestShape | None, str | None]:
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


def _fill_times(record: Record, exchange: ExchangeCopy, answer: Completion | None, epoch_ns: int) -> None:
    record.arrival_ms = (exchange.arrival_ns - epoch_ns) / 1e6
    record.e2e_ms = (exchange.end_ns - exchange.arrival_ns) / 1e6
    if exchange.response_reads:
        record.first_byte_ms = (exchange.response_reads[0][0] - exchange.arrival_ns) / 1e6
    if answer is None or answer.first_token_ns is None:
        return
    record.ttft_ms = (answer.first_token_ns - exchange.arrival_ns) / 1e6
    record.itl_ms = [gap / 1e6 for gap in answer.gaps_ns]
    record.itl_tokens = list(answer.gap_tokens)


def _fill_outcome(record: Record, exchange: ExchangeCopy, answer: Completion | None) -> None:
    record.endpoint = exchange.endpoint
    record.concurrency = exchange.concurrency
    record.http_status = exchange.http_status
    record.status = exchange.outcome
    record.error = exchange.error_kind
    ended = answer is not None and answer.done and answer.first_token_ns is not None
    if exchange.outcome == "client_abort" and ended:
        # OpenAI's client closes at ``[DONE]``, before the chunk that ends the body: its response was complete.
        record.status, record.error = "ok", None
    if exchange.outcome == "ok" and exchange.http_status is not None and exchange.http_status >= 400:
        record.status, record.error = "error", f"http_{exchange.http_status}"
    elif exchange.outcome == "ok" and answer is not None and answer.error_kind is not None:
        record.status, record.error = "error", answer.error_kind
    elif exchange.outcome == "ok" and answer is not None and not answer.done and answer.finish_reason is None:
        record.status, record.error = "error", "response_incomplete"
    if answer is not None:
        reason = answer.finish_reason
        record.finish_reason = reason if reason is None or reason in FINISH_REASONS else "other"


def _fill_counts(record: Record, exchange: ExchangeCopy, answer: Completion | None) -> None:
    """Fill in the engine's usage, else the output tokens counted in the stream."""
    if answer is None or record.http_status is None or record.http_status >= 400:
        return
    record.prompt_tokens = answer.prompt_tokens
    record.cached_tokens = answer.cached_tokens
    record.output_tokens = answer.output_tokens
    if answer.output_tokens is None and exchange.response_whole and answer.first_token_ns is not None:
        record.output_tokens = answer.seen_tokens
        record.tokens_source = "estimate"
    if answer.prompt_tokens is not None:
        record.tokens_source = "usage"


def _refuse_usage(answer: Completion) -> None:
    """Take out the counts that no engine can have: readers would allocate by them, or divide."""
    if answer.prompt_tokens is not None and answer.prompt_tokens > MOST_TOKENS:
        answer.prompt_tokens = None
    if answer.output_tokens is not None and answer.output_tokens > MOST_TOKENS:
        answer.output_tokens = None
        answer.first_tokens, answer.gap_tokens = 1, [1] * len(answer.gap_tokens)
    most_cached = MOST_TOKENS if answer.prompt_tokens is None else answer.prompt_tokens
    if answer.cached_tokens is not None and answer.cached_tokens > most_cached:
        answer.cached_tokens = None


def _fill_prompt(record: Record, prompt: HashedPrompt, block_size: int) -> None:
    """Fill in the chain, and the prompt's length where the engine did not report it."""
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
