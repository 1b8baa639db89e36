"""Responses and Messages streams, byte by byte: the read of the first token, and usage."""

import json
from typing import Any

import pytest

from wire.answer import parse_answer
from wire.completion import Completion


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, **fields}).encode())


def stream(endpoint: str, *timed: tuple[int, bytes]) -> Completion:
    return parse_answer(endpoint, [(at_ns, data) for at_ns, data in timed], stream=True)


def complete(endpoint: str, body: Any) -> Completion:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_answer(endpoint, [(1, data[:10]), (2, data[10:])], stream=False)


RESPONSES = "/v1/responses"
CREATED = event("response.created", response={"id": "resp_1", "model": "m", "status": "in_progress", "output": []})
MESSAGE_ADDED = event("response.output_item.added", item={"type": "message", "content": [], "role": "assistant"})
PART_ADDED = event("response.content_part.added", part={"type": "output_text", "text": ""})
TEXT = event("response.output_text.delta", delta="hi", item_id="msg_1", sequence_number=4)
TEXT_DONE = event("response.output_text.done", text="hihi")
RESPONSE_USAGE = {
    "input_tokens": 20, "input_tokens_details": {"cached_tokens": 16}, "output_tokens": 3, "total_tokens": 23
}  # fmt: skip
OUTPUT = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
    {"type": "function_call", "name": "sail", "arguments": "{}", "call_id": "c"},
    {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
]
COMPLETED = event(
    "response.completed", response={"model": "m", "status": "completed", "output": OUTPUT, "usage": RESPONSE_USAGE}
)


def test_responses_first_token_and_usage() -> None:
    answer = stream(
        RESPONSES, (10, CREATED), (20, MESSAGE_ADDED + PART_ADDED), (30, TEXT), (45, TEXT), (50, TEXT_DONE + COMPLETED)
    )
    assert (answer.first_token_ns, answer.gaps_ns, answer.gap_tokens) == (30, [15], [1])
    assert answer.first_tokens == 2, "the token that stops has no event, and is left with the first"
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (20, 3, 16)
    assert (answer.finish_reason, answer.model, answer.text) == ("stop", "m", "hihi")
    assert (answer.done, answer.error_kind) == (True, None)


@pytest.mark.parametrize(
    "first",
    [
        event("response.reasoning_text.delta", delta="hm"),
        event("response.reasoning_summary_text.delta", delta="hm"),
        event("response.refusal.delta", delta="no"),
        event("response.function_call_arguments.delta", delta='{"'),
        event("response.custom_tool_call_input.delta", delta="x"),
        event("response.output_item.added", item={"type": "function_call", "name": "sail", "arguments": ""}),
    ],
)
def test_responses_reasoning_refusals_and_calls_are_tokens(first: bytes) -> None:
    answer = stream(RESPONSES, (10, CREATED), (20, event("response.in_progress")), (30, first), (40, TEXT))
    assert (answer.first_token_ns, answer.gaps_ns, answer.text) == (30, [10], "hi")
    assert (answer.done, answer.finish_reason) == (False, None)


@pytest.mark.parametrize(
    ("end", "finish_reason", "error_kind"),
    [
        (
            event(
                "response.incomplete",
                response={"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            ),
            "length",
            None,
        ),
        (
            event("response.failed", response={"status": "failed", "error": {"message": "secret"}}),
            "failed",
            "stream_error",
        ),
    ],
)
def test_responses_ends(end: bytes, finish_reason: str, error_kind: str | None) -> None:
    answer = stream(RESPONSES, (1, TEXT), (2, end))
    assert (answer.done, answer.finish_reason, answer.error_kind) == (True, finish_reason, error_kind)
    assert "secret" not in repr(answer)


def test_responses_body_has_text_and_token_ids() -> None:
    body = {"object": "response", "model": "m", "status": "completed", "error": None, "output": OUTPUT}
    ids = {"input_messages": [{"type": "raw_message_tokens", "message": "x", "tokens": [1, 2]}], "output_messages": []}
    answer = complete(RESPONSES, {**body, **ids, "usage": RESPONSE_USAGE})
    assert (answer.text, answer.finish_reason, answer.first_token_ns, answer.done) == ("hi", "stop", None, True)
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (20, 3, 16)
    assert (answer.prompt_token_ids, answer.token_ids) == ([1, 2], None)
    assert complete(RESPONSES, {"error": {"message": "m"}}).error_kind == "stream_error"
    assert complete(RESPONSES, b"<html>").error_kind == "unparseable"


MESSAGES = "/v1/messages"
PING = event("ping")
TEXT_START = event("content_block_start", index=0, content_block={"type": "text", "text": ""})
TEXT_DELTA = event("content_block_delta", index=0, delta={"type": "text_delta", "text": "hi"})
TEXT_STOP = event("content_block_stop", index=0)
STOP = event("message_stop")


def started(**usage: int) -> bytes:
    return event("message_start", message={"type": "message", "role": "assistant", "model": "m", "usage": usage})


def ended(**usage: int) -> bytes:
    return event("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage=usage)


def test_messages_first_token_and_prompt_tokens() -> None:
    """As Anthropic's own servers do it: the prompt's parts at the start, the output's count at the end."""
    start = started(input_tokens=5, cache_read_input_tokens=64, cache_creation_input_tokens=16, output_tokens=1)
    answer = stream(
        MESSAGES, (10, start), (20, PING + TEXT_START), (30, TEXT_DELTA), (50, TEXT_DELTA),
        (60, TEXT_STOP + ended(output_tokens=3) + STOP),
    )  # fmt: skip
    assert (answer.first_token_ns, answer.gaps_ns, answer.gap_tokens) == (30, [20], [1])
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (85, 64, 3)
    assert (answer.text, answer.model, answer.finish_reason, answer.done) == ("hihi", "m", "stop", True)


def test_messages_usage_at_the_end_has_precedence() -> None:
    """As vLLM: total prompt tokens at the start, cached and uncached tokens at the end."""
    end = ended(input_tokens=20, cache_read_input_tokens=80, output_tokens=2)
    answer = stream(MESSAGES, (1, started(input_tokens=100, output_tokens=0)), (2, TEXT_DELTA), (3, end + STOP))
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (100, 80, 2)


@pytest.mark.parametrize(
    ("first", "is_token"),
    [
        (event("content_block_delta", delta={"type": "thinking_delta", "thinking": "hm"}), True),
        (event("content_block_delta", delta={"type": "input_json_delta", "partial_json": '{"'}), True),
        (event("content_block_start", content_block={"type": "tool_use", "name": "sail", "input": {}}), True),
        (event("content_block_start", content_block={"type": "thinking", "thinking": ""}), False),
        (event("content_block_delta", delta={"type": "input_json_delta", "partial_json": ""}), False),
        (event("content_block_delta", delta={"type": "signature_delta", "signature": "abc"}), False),
        (event("content_block_start", index=0), False),
        (event("content_block_delta", index=0), False),
    ],
)
def test_messages_token_events(first: bytes, is_token: bool) -> None:
    answer = stream(MESSAGES, (10, started(input_tokens=1)), (20, first), (30, TEXT_DELTA))
    assert answer.first_token_ns == (20 if is_token else 30)
    assert answer.text == "hi"


def test_messages_body() -> None:
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "t", "name": "sail", "input": {"to": "sea"}},
        {"type": "text", "text": "b"},
    ]
    usage = {"input_tokens": 4, "cache_read_input_tokens": 8, "output_tokens": 6}
    answer = complete(MESSAGES, {"type": "message", "model": "m", "content": content, "usage": usage})
    assert (answer.text, answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == ("ab", 12, 8, 6)
    assert (answer.done, answer.first_token_ns, answer.error_kind) == (True, None, None)


def test_token_arrives_with_the_read_that_completes_its_event_in_all_apis() -> None:
    for endpoint, data in ((RESPONSES, TEXT), (MESSAGES, TEXT_DELTA)):
        for cut in range(1, len(data)):
            assert stream(endpoint, (10, data[:cut]), (20, data[cut:])).first_token_ns == 20


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_llamacpp_timings_count_without_usage(endpoint: str) -> None:
    word = b'data: {"choices":[{"index":0,"text":"a","delta":{"content":"a"}}]}\n\n'
    last = b'data: {"choices":[],"timings":{"cache_n":290,"prompt_n":120,"predicted_n":2,"prompt_ms":9.5}}\n\n'
    answer = stream(endpoint, (1, word), (2, last))
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (410, 290, 2)
    usage = b'data: {"usage":{"prompt_tokens":411,"completion_tokens":3},"timings":{"cache_n":290,"prompt_n":120}}\n\n'
    answer = stream(endpoint, (1, word), (2, usage))
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (411, 290, 3)


DIALECTS = {
    "vllm": (
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
        b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null}\n\n',
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
        b'"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n',
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
        b'"delta":{"content":"!"},"logprobs":null,"finish_reason":"stop","stop_reason":null,"token_ids":null}]}\n\n',
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{'
        b'"prompt_tokens":20,"total_tokens":23,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":16}}}\n\n'
        b"data: [DONE]\n\n",
    ),
    "sglang": (
        b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{'
        b'"role":"assistant","content":"","reasoning_content":null,"tool_calls":null},"logprobs":null,'
        b'"finish_reason":null,"matched_stop":null}],"usage":null}\n\n',
        b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{'
        b'"role":null,"content":"Hi","reasoning_content":null,"tool_calls":null},"finish_reason":null}]}\n\n',
        b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{'
        b'"content":"!"},"finish_reason":null,"matched_stop":null}],"usage":null}\n\n',
        b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{},'
        b'"finish_reason":"stop","matched_stop":7}],"usage":null}\n\n'
        b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{'
        b'"prompt_tokens":20,"total_tokens":23,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":16},'
        b'"reasoning_tokens":0}}\n\ndata: [DONE]\n\n',
    ),
    "llamacpp": (
        b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],'
        b'"created":1,"id":"chatcmpl-1","model":"m","object":"chat.completion.chunk"}\n\n',
        b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"Hi"}}],"created":1,"model":"m"}\n\n',
        b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"!"}}],"created":1,"model":"m"}\n\n',
        b'data: {"choices":[{"finish_reason":"stop","index":0,"delta":{}}],"created":1,"model":"m","timings":{'
        b'"cache_n":16,"prompt_n":4,"prompt_ms":9.1,"prompt_per_second":439.5,"predicted_n":3,"predicted_ms":30.2}}'
        b"\n\ndata: [DONE]\n\n",
    ),
    "trtllm": (
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
        b'"delta":{"role":"assistant","content":"","reasoning_content":null,"tool_calls":[]},"logprobs":null,'
        b'"finish_reason":null,"stop_reason":null}],"usage":null}\n\n',
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
        b'"delta":{"role":null,"content":"Hi","tool_calls":[]},"finish_reason":null}],"usage":null}\n\n',
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
        b'"delta":{"content":"!"},"finish_reason":"stop","stop_reason":null}],"usage":null}\n\n',
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{'
        b'"prompt_tokens":20,"total_tokens":23,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":16}}}\n\n'
        b"data: [DONE]\n\n",
    ),
}
"""The same short chat as four engines stream it: the role, two tokens with text, the end."""


@pytest.mark.parametrize("dialect", DIALECTS)
def test_native_and_openai_responses_agree(dialect: str) -> None:
    reads = [(10 * at, data) for at, data in enumerate(DIALECTS[dialect])]
    answer = stream("/v1/chat/completions", *reads)
    assert (answer.first_token_ns, answer.gaps_ns, answer.first_tokens, answer.gap_tokens) == (10, [10], 2, [1])
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (20, 3, 16)
    assert (answer.text, answer.finish_reason, answer.model, answer.done) == ("Hi!", "stop", "m", True)
    assert answer.error_kind is None
