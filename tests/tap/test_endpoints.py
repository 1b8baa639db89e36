"""Each API's requests and responses made into records, from the bytes that clients and engines send."""

import gc
import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from engines.dialect import DialectName
from tap.ipc.messages import CapturedExchange, Endpoint
from tap.prompts.prompt import PromptHasher
from tap.proxy.capture_buffer import recorded_endpoint
from tap.recorder.recording import RecordBuilder, RecordResult
from tracefile.analysis.checking import check_gaps, check_hashes, check_signs, check_times, check_tokens
from tracefile.hashing.blockhash import BlockHasher, keyed_id
from tracefile.hashing.hashkey import HashKey
from tracefile.records.schema import MOST_TOKENS, Record
from wire.answer import GENERATING

KEY = HashKey(bytes(32))
RULES = (check_signs, check_times, check_gaps, check_tokens, check_hashes)
BLOCK = 4


class LetterTokenizer:
    """A character is a token, a chat is ``role:content|`` for each message, then the tools' names, then ``>``."""

    def encode_text(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        return [*([1] if add_special_tokens else []), *(ord(letter) for letter in text)]

    def encode_chat(self, body: Any) -> Sequence[int]:
        printed = "".join(f"{message['role']}:{message.get('content')}|" for message in body["messages"])
        tools = "".join(tool["function"]["name"] + "," for tool in body.get("tools") or ())
        return self.encode_text(printed + tools + ">", add_special_tokens=False)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def chain(ids: Sequence[int], model: str = "m") -> list[int]:
    """Hash chain by the documented rule: each block's hash includes the previous hash."""
    hasher = BlockHasher(KEY, block_size=BLOCK, model=model)
    hashes: list[Any] = []
    for at in range(0, len(ids) - BLOCK + 1, BLOCK):
        hashes += hasher.extend(hashes[-1] if hashes else None, ids[at : at + BLOCK])
    return hashes


def maker(tokenizer: Any = None, **settings: Any) -> RecordBuilder:
    prompts = PromptHasher(KEY, "xxh3_64", BLOCK, tokenizer=tokenizer)
    return RecordBuilder(KEY, prompts, epoch_ns=0, hash_model=None, **settings)


def exchange(endpoint: Endpoint, body: Any, answer: Any, **fields: Any) -> CapturedExchange:
    """An answer that is a list is a stream: each of its events comes with a read of its own, 1 ms after the other."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    if isinstance(answer, list):
        content_type = "text/event-stream"
        reads = [((at + 1) * 1_000_000, b"data: %b\n\n" % json.dumps(each).encode()) for at, each in enumerate(answer)]
    else:
        content_type = "application/json"
        reads = [(1_000_000, answer if isinstance(answer, bytes) else json.dumps(answer).encode())]
    settings: dict[str, Any] = {
        "endpoint": endpoint, "arrival_ns": 0, "end_ns": 99_000_000, "concurrency": 1, "request_headers": {},
        "request_body": [data], "http_status": 200, "response_headers": {"content-type": content_type},
        "response_reads": reads, "response_complete": True, "last_reads": [], "outcome": "ok", "error_kind": None,
    }  # fmt: skip
    return CapturedExchange(**(settings | fields))


def built(endpoint: Endpoint, body: Any, answer: Any, tokenizer: Any = None, **fields: Any) -> RecordResult:
    return maker(tokenizer or LetterTokenizer()).build(exchange(endpoint, body, answer, **fields))


def responses_usage(prompt: int, output: int, cached: int) -> dict[str, Any]:
    return {"input_tokens": prompt, "output_tokens": output, "input_tokens_details": {"cached_tokens": cached}}


@pytest.mark.parametrize(
    ("target", "endpoint"),
    [
        (b"/v1/completions?x=1", "/v1/completions"),
        (b"/gateway/v1/chat/completions", "/v1/chat/completions"),
        (b"/v1/responses/resp_0a1/cancel", "/v1/responses/*/cancel"),
        (b"/v1/messages/count_tokens", None),
        (b"/v1/load_lora_adapter", None),
        (b"/v1/users/alicecanary/chat", "/v1/*/*/chat"),
        (b"/v1/canary", "/v1/*"),
        (b"/v1/0b3f", None),
        (b"/llama/completion?x", "/completion"),
        (b"/generate", "/generate"),
        (b"/model/alicecanary/converse-stream", "/converse-stream"),
    ],
)
def test_recorded_endpoints(target: bytes, endpoint: str | None) -> None:
    assert recorded_endpoint(target) == endpoint


@given(
    target=st.sampled_from(
        [b"/v1/chat/completions", b"/g/v1/messages", b"/v1/responses/r1/cancel", b"/v1/files", b"/x"]
    ),
    encoded=st.sets(st.integers(0, 30)),
    upper=st.booleans(),
)
def test_encoded_paths_are_the_same_endpoint(target: bytes, encoded: set[int], upper: bool) -> None:
    form = b"%%%02X" if upper else b"%%%02x"
    second = b"".join(form % byte if at in encoded and at else bytes([byte]) for at, byte in enumerate(target))
    assert recorded_endpoint(second) == recorded_endpoint(target)


def test_responses_api_is_recorded_as_a_chat() -> None:
    body = {
        "model": "m", "stream": True, "max_output_tokens": 64, "instructions": "be", "user": "u",
        "input": [{"role": "user", "content": "hey"}], "tools": [{"type": "function", "name": "sail"}],
    }  # fmt: skip
    prompt = letters("system:be|user:hey|sail,>")
    answer = [
        {"type": "response.created", "response": {"model": "m", "status": "in_progress"}},
        {"type": "response.output_item.added", "item": {"type": "message", "content": []}},
        {"type": "response.output_text.delta", "delta": "yo"},
        {"type": "response.output_text.delta", "delta": "ho"},
        {"type": "response.completed", "response": {"status": "completed", "usage": responses_usage(25, 5, 8)}},
    ]
    record = built("/v1/responses", body, answer).record
    assert (record.endpoint, record.model, record.stream, record.max_tokens) == ("/v1/responses", "m", True, 64)
    assert (record.tools, record.status, record.finish_reason) == (1, "ok", "stop")
    assert (record.ttft_ms, record.itl_ms) == (3.0, [1.0])
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (25, 5, 8)
    # Four text tokens and the stop token: the KV of the last of 30 tokens is never computed, 29 // 4 = 7 blocks.
    assert record.block_hashes == chain(prompt)
    assert record.block_hashes + (record.output_block_hashes or []) == chain([*prompt, *letters("yoho")])
    assert (record.hash_source, record.output_hash_source) == ("tokenizer", "tokenizer")
    assert record.session_id == keyed_id(KEY, "session", "u")


def native(content: str, ids: list[int], **fields: Any) -> dict[str, Any]:
    """Event of llama.cpp's own API."""
    return {"index": 0, "content": content, "tokens": ids, "stop": False, "id_slot": 1, **fields}


@pytest.mark.parametrize(
    ("endpoint", "prompt", "source"),
    [
        ("/completion", [1, 2, 3, 4, 5], "engine"),
        ("/completion", "abcde", "tokenizer"),
        ("/v1/completions", [1], "engine"),
    ],
)
def test_llamacpp_native_completion(endpoint: str, prompt: str | list[int], source: str) -> None:
    body = {"prompt": prompt, "n_predict": 3, "n_cmpl": 2, "stream": True, "model": "m"}
    ids = [1, *letters(prompt)] if isinstance(prompt, str) else prompt
    counts = {"tokens_predicted": 3, "tokens_evaluated": len(ids), "timings": {"cache_n": len(ids) - 1, "prompt_n": 1}}
    end = native("", [], **counts | {"stop": True, "stop_type": "limit"})
    # Its /completions is not OpenAI's: the response shows it.
    record = built(endpoint, body, [native("x", [7]), native("yz", [8, 9]), end]).record
    assert (record.endpoint, record.status, record.finish_reason, record.stream) == (
        "/completion",
        "ok",
        "length",
        True,
    )
    assert (record.max_tokens, record.n, record.tokens_source) == (3, 2, "usage")
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (len(ids), len(ids) - 1, 3)
    assert (record.ttft_ms, record.itl_ms, record.itl_tokens) == (1.0, [1.0], [2])
    assert (record.block_hashes, record.hash_source) == (chain(ids), source)


def test_truncated_responses_api_is_incomplete() -> None:
    answer = [{"type": "response.output_text.delta", "delta": "yo"}]
    record = built("/v1/responses", {"input": "x", "stream": True}, answer).record
    assert (record.status, record.error, record.output_tokens) == ("error", "response_incomplete", 1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]}, "encrypted_reasoning"),
    ],
)
def test_requests_with_server_state_are_unhashed(fields: dict[str, Any], reason: str) -> None:
    answer = {"status": "completed", "usage": responses_usage(9, 1, 0), "output": []}
    actual = built("/v1/responses", {"model": "m", "input": "go on", **fields}, answer)
    assert (actual.unhashed, actual.record.block_hashes, actual.record.prompt_tokens) == (reason, None, 9)
    session = actual.record.session_id
    assert session == (keyed_id(KEY, "session", "conv_1") if reason == "conversation" else None)


def test_engine_token_ids_are_hashed_if_the_prompt_is_not_in_the_request() -> None:
    ids = list(range(9))
    answer = {
        "status": "completed", "output": [], "usage": responses_usage(9, 2, 0),
        "input_messages": [{"tokens": ids, "message": ""}], "output_messages": [{"tokens": [20, 21], "message": ""}],
    }  # fmt: skip
    actual = built("/v1/responses", {"model": "m", "input": "x", "previous_response_id": "r"}, answer)
    assert (actual.record.block_hashes, actual.record.hash_source) == (chain(ids), "engine")
    assert (actual.record.output_block_hashes, actual.record.output_hash_source) == ([], "engine")
    assert (actual.unhashed, actual.prompt_count_matches) == (None, True)


def test_streamed_message_with_tools_and_cached_prompt() -> None:
    body = {
        "model": "m", "max_tokens": 9, "stream": True, "system": [{"type": "text", "text": "be"}],
        "tools": [{"name": "sail", "input_schema": {}}], "metadata": {"user_id": "s"},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hey"}]}],
    }  # fmt: skip
    prompt = letters("system:be|user:hey|sail,>")
    start = {"input_tokens": 5, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 4, "output_tokens": 1}
    answer = [
        {"type": "message_start", "message": {"model": "m", "usage": start}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "yo"}},
        {"type": "ping"},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ]
    actual = built("/v1/messages", body, answer)
    record = actual.record
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (25, 16, 2)
    assert (record.ttft_ms, record.finish_reason, record.status, record.max_tokens) == (3.0, "length", "ok", 9)
    assert record.block_hashes == chain(prompt)
    assert (record.output_block_hashes, record.output_hash_source) == ([], "tokenizer")
    assert (actual.prompt_count_matches, record.session_id) == (True, keyed_id(KEY, "session", "s"))


def test_embeddings_prompt_is_hashed() -> None:
    answer = {"object": "list", "data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 5, "total_tokens": 5}}
    for sent in ("seas", ["seas"]):
        record = built("/v1/embeddings", {"model": "m", "input": sent}, answer).record
        assert record.block_hashes == chain([1, *letters("seas")])
        assert (record.status, record.prompt_tokens, record.output_tokens) == ("ok", 5, None)
    assert built("/v1/embeddings", {"model": "m", "input": [1, 2, 3, 4, 5]}, answer).record.hash_source == "engine"
    batch = built("/v1/embeddings", {"model": "m", "input": ["a", "b"]}, answer)
    assert (batch.unhashed, batch.record.prompt_tokens) == ("batch", 5)


@pytest.mark.parametrize(
    ("endpoint", "body", "answer", "content_type", "reason"),
    [
        ("/v1/rerank", {"query": "q", "documents": ["d"]}, {"results": [], "usage": {}}, "application/json", "other"),
        ("/v1/audio/transcriptions", b"--boundary\r\n\x00", {"text": "said"}, "application/json", "form"),
    ],
)
def test_unknown_endpoint_is_recorded_by_shape(
    endpoint: str, body: Any, answer: Any, content_type: str, reason: str
) -> None:
    actual = built(endpoint, body, answer, response_headers={"content-type": content_type})
    assert (actual.record.endpoint, actual.record.status, actual.record.http_status) == (endpoint, "ok", 200)
    assert actual.record.block_hashes is None
    assert actual.unhashed == {"other": "other_endpoint", "form": "request_not_json"}[reason]


def test_several_choices_have_summed_tokens_and_no_output_hashes() -> None:
    choices = [{"index": index, "text": "ab", "token_ids": [5, 6]} for index in range(3)]
    answer = {"choices": choices, "usage": {"prompt_tokens": 4, "completion_tokens": 6}}
    body = {"model": "m", "prompt": [1, 2, 3, 4], "n": 3, "logprobs": 5}
    record = built("/v1/completions", body, answer).record
    assert (record.n, record.output_tokens, record.block_hashes) == (3, 6, chain([1, 2, 3, 4]))
    assert (record.output_block_hashes, record.output_hash_source) == (None, None)


def usage_of(details: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "prompt_tokens_details": details}
    return {"choices": [{"text": "a", "finish_reason": "length"}], "usage": usage}


@pytest.mark.parametrize(
    ("dialect", "expected"), [("sglang", [None, 3, 0]), ("vllm", [None, 3, None]), ("llamacpp", [None, 3, None])]
)
def test_sglang_missing_cached_tokens_are_zero_after_a_report(dialect: DialectName, expected: list[int | None]) -> None:
    recorder = maker(dialect=dialect)
    body = {"model": "m", "prompt": [1, 2, 3, 4]}
    answers = [usage_of(None), usage_of({"cached_tokens": 3}), usage_of(None)]
    records = [recorder.build(exchange("/v1/completions", body, answer)).record for answer in answers]
    assert [record.cached_tokens for record in records] == expected
    failed = recorder.build(exchange("/v1/completions", body, {"error": {}}, http_status=500)).record
    assert failed.cached_tokens is None, "no usage, no count"


def test_record_has_headers_upstream_and_injections() -> None:
    recorder = maker(keep_headers=("x-team", "x-none"))
    body, answer = {"model": "m", "prompt": [1, 2, 3, 4]}, usage_of(None)
    headers = {"x-team": "search", "x-request-id": "r"}
    copy = exchange("/v1/completions", body, answer, request_headers=headers, upstream="http://b:1", injected=["usage"])
    record = recorder.build(copy).record
    assert (record.headers, record.upstream, record.injected) == ({"x-team": "search"}, "http://b:1", ["usage"])
    plain = recorder.build(exchange("/v1/completions", body, answer)).record
    assert (plain.headers, plain.upstream, plain.injected) == (None, None, None)


def packed(coding: str, data: bytes) -> bytes:
    if coding == "zstd":
        return zstandard.compress(data[:7]) + zstandard.compress(data[7:])
    return gzip.compress(data) if coding == "gzip" else zlib.compress(data)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
def test_compressed_bodies_are_decoded(coding: str) -> None:
    body = packed(coding, json.dumps({"model": "m", "prompt": [1, 2, 3, 4]}).encode())
    answer = packed(coding, json.dumps(usage_of({"cached_tokens": 0})).encode())
    record = built(
        "/v1/completions", body, answer, request_headers={"content-encoding": coding},
        response_headers={"content-type": "application/json", "content-encoding": coding},
    ).record  # fmt: skip
    assert (record.block_hashes, record.prompt_tokens, record.cached_tokens) == (chain([1, 2, 3, 4]), 4, 0)


def test_truncated_stream_has_no_output_tokens() -> None:
    """The copy has the stream's beginning and its end: the tokens between are not counted, and unknown is not 0."""
    body, event = {"model": "m", "prompt": [1, 2, 3, 4], "stream": True}, {"choices": [{"index": 0, "text": "x"}]}
    end = [(98_000_000, b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(event).encode())]
    cut = built("/v1/completions", body, [event, event], response_complete=False, last_reads=end).record
    assert (cut.status, cut.ttft_ms, cut.itl_ms) == ("ok", 1.0, [])
    assert (cut.prompt_tokens, cut.output_tokens, cut.tokens_source) == (4, None, "tokenizer")
    complete = built("/v1/completions", body, [event, event]).record
    assert (complete.prompt_tokens, complete.output_tokens, complete.itl_tokens) == (4, 2, [1])


@pytest.mark.parametrize("stream", [False, True])
def test_response_without_content_type(stream: bool) -> None:
    """A gateway leaves the header out."""
    body, answer = {"model": "m", "prompt": [1, 2, 3, 4], "stream": stream}, usage_of({"cached_tokens": 0})
    record = built("/v1/completions", body, [answer] if stream else answer, response_headers={}).record
    assert (record.status, record.error, record.tokens_source) == ("ok", None, "usage")
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (4, 1, 0)
    assert record.ttft_ms == (1.0 if stream else None)


ENDPOINTS = (*GENERATING, "/v1/embeddings", "/v1/rerank")
NAMES = (
    "model", "messages", "prompt", "input", "tools", "system", "role", "content", "type", "text", "name", "metadata",
    "user", "max_tokens", "n", "priority", "stream", "session_id", "user_id", "conversation", "cache_salt", "arguments",
    "choices", "usage", "prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "index", "delta",
    "message", "token_ids", "prompt_token_ids", "finish_reason", "prompt_tokens_details", "cached_tokens", "error",
    "response", "item", "output", "content_block", "tool_use", "function", "image_url", "response.output_text.delta",
    "response.completed", "message_start", "message_delta", "content_block_delta", "tool_result", "function_call",
)  # fmt: skip
LEAF = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.sampled_from(NAMES), st.text())
JSON = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6)
)


@given(endpoint=st.sampled_from(sorted(ENDPOINTS)), body=JSON, answer=JSON | st.lists(JSON) | st.binary())
def test_every_request_has_a_valid_record(endpoint: str, body: Any, answer: Any) -> None:
    for recorder in (maker(LetterTokenizer()), maker()):
        record = recorder.build(exchange(endpoint, body, answer)).record
        assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(record)), Record) == record
        assert_checked(record)


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"max_tokens": -1}, (None, None)),
        ({"n": -1, "max_tokens": 2**31}, (None, None)),
        ({"max_tokens": 0, "n": 2}, (0, 2)),
    ],
)
def test_invalid_counts_of_a_client_are_null(fields: Any, shape: tuple[Any, Any]) -> None:
    record = built("/v1/completions", {"model": "m", "prompt": [1, 2, 3, 4], **fields}, usage_of(None)).record
    assert (record.max_tokens, record.n) == shape
    assert_checked(record)


def assert_checked(record: Record) -> None:
    actual = [finding for rule in RULES for finding in rule(record, BLOCK)]
    assert actual == []


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ((1 << 40, 1 << 40, None), (4, 2, None)),
        ((4, MOST_TOKENS + 1, 2), (4, 2, 2)),
        ((4, 2, 5), (4, 2, None)),
        ((4, 2, 4), (4, 2, 4)),
    ],
)
def test_impossible_usage_is_ignored(usage: Any, counts: Any) -> None:
    prompt, output, cached = usage
    details = None if cached is None else {"cached_tokens": cached}
    reported = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    answer = [
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "b", "finish_reason": "stop"}]},
        {"choices": [], "usage": reported},
    ]
    record = built("/v1/completions", {"model": "m", "prompt": [1, 2, 3, 4], "stream": True}, answer).record
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == counts
    assert (record.status, record.block_hashes) == ("ok", chain([1, 2, 3, 4]))
    assert_checked(record)


@pytest.mark.parametrize("reason", ["alice's secret", "x" * 100, "\x1b[2J", "kanarie"])
def test_unknown_finish_reason_is_recorded_as_other(reason: str) -> None:
    answer = {"choices": [{"text": "a", "finish_reason": reason}]}
    assert built("/v1/completions", {"model": "m", "prompt": [1]}, answer).record.finish_reason == "other"


@pytest.mark.parametrize("model", ["a\x1b[2Jb", "a\nb", "m" * 201, "\u202eabc"])
def test_model_names_with_control_characters_are_ignored(model: str) -> None:
    assert built("/v1/completions", {"model": model, "prompt": [1]}, usage_of(None)).record.model is None


def test_long_cache_salt_is_not_cached() -> None:
    recorder = maker(LetterTokenizer())
    before = bytes_used_after(lambda: None)
    chains = set()

    def record_salts() -> None:
        for number in range(20):
            body = {"model": "m", "prompt": "a prompt of some words", "cache_salt": f"{number}" + "s" * 200_000}
            chains.add(
                tuple(recorder.build(exchange("/v1/completions", body, usage_of(None))).record.block_hashes or ())
            )

    assert bytes_used_after(record_salts) - before < 1_000_000
    assert len(chains) == 20, "each salt has a chain of its own"


def bytes_used_after(work: Callable[[], None]) -> int:
    """Return the bytes that are held after some work."""
    tracemalloc.start()
    work()
    gc.collect()
    cached_keys, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return cached_keys
