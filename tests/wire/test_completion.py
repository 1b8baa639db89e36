"""What counts as a token, and when it came."""

import pytest

from wire.answer import parse_answer
from wire.completion import Completion, parse_body

CHAT_ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
CHAT_WORD = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
CHAT_END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = (
    b'data: {"model":"m","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def parsed(reads: list[tuple[int, bytes]], *, stream: bool) -> Completion:
    return parse_answer("/v1/completions", reads, stream=stream)


def reads(*timed: tuple[int, bytes]) -> list[tuple[int, bytes]]:
    return [(at_ns, data) for at_ns, data in timed]


def test_role_and_usage_events_are_no_tokens() -> None:
    completion = parsed(
        reads((10, CHAT_ROLE), (20, CHAT_WORD), (35, CHAT_WORD), (60, CHAT_END), (70, USAGE + DONE)),
        stream=True,
    )
    assert completion.first_token_ns == 20
    assert (completion.gaps_ns, completion.gap_tokens) == ([15], [1])
    assert (completion.prompt_tokens, completion.output_tokens, completion.cached_tokens) == (9, 3, 0)
    assert (completion.finish_reason, completion.model, completion.text, completion.done) == ("stop", "m", "hihi", True)
    assert completion.error_kind is None


def test_token_arrives_with_the_read_that_completes_its_event() -> None:
    for cut in range(1, len(CHAT_WORD)):
        completion = parsed(reads((10, CHAT_WORD[:cut]), (20, CHAT_WORD[cut:])), stream=True)
        assert completion.first_token_ns == 20
    # Two events in one read are a gap of two tokens.
    completion = parsed(reads((10, CHAT_WORD), (30, CHAT_WORD + CHAT_WORD)), stream=True)
    assert (completion.gaps_ns, completion.gap_tokens, completion.streamed_tokens) == ([20], [2], 3)


def test_token_ids_without_text_count() -> None:
    first = b'data: {"choices":[{"index":0,"text":"","token_ids":[5,6],"prompt_token_ids":[1,2]}]}\n\n'
    second = b'data: {"choices":[{"index":0,"text":"x","token_ids":[7],"prompt_token_ids":null}]}\n\n'
    completion = parsed(reads((10, first), (20, second)), stream=True)
    assert (completion.first_token_ns, completion.first_tokens, completion.gap_tokens) == (10, 2, [1])
    assert (completion.token_ids, completion.prompt_token_ids) == ([5, 6, 7], [1, 2])


def test_an_unreported_hit_is_not_a_miss() -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\n'
    assert parsed(reads((1, usage)), stream=True).cached_tokens is None
    null = b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":null}}}\n\n'
    assert parsed(reads((1, null)), stream=True).cached_tokens is None


def test_errors_have_no_text() -> None:
    failed = parsed(reads((1, b'data: {"error":{"message":"secret prompt"}}\n\n')), stream=True)
    assert failed.error_kind == "stream_error"
    assert "secret" not in repr(failed)
    assert parsed(reads((1, b"data: {not json\n\n")), stream=True).error_kind == "unparseable"
    assert parsed(reads((1, b"<html>")), stream=False).error_kind == "unparseable"
    assert parsed(reads((1, b'data: {"error":null,"choices":[]}\n\n')), stream=True).error_kind is None


def test_body_without_stream_has_no_first_token() -> None:
    body = (
        b'{"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"length",'
        b'"token_ids":[4]}],"prompt_token_ids":[1,2,3],"usage":{"prompt_tokens":3,"completion_tokens":1}}'
    )
    for pieces in ([body], [body[:20], body[20:]]):
        completion = parsed([(i, piece) for i, piece in enumerate(pieces)], stream=False)
        assert completion.first_token_ns is None
        assert (completion.prompt_tokens, completion.output_tokens, completion.text) == (3, 1, "hi")
        assert (completion.token_ids, completion.prompt_token_ids) == ([4], [1, 2, 3])
        assert (completion.finish_reason, completion.done) == ("length", True)


def streamed(events: list[bytes], usage_tokens: int) -> tuple[int, list[int]]:
    """Tokens of the first and of each later read, if each event is a read and usage has ``usage_tokens``."""
    usage = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % usage_tokens
    completion = parsed(reads(*enumerate([*events, usage, DONE])), stream=True)
    assert completion.streamed_tokens == usage_tokens
    return completion.first_tokens, completion.gap_tokens


def test_event_counts_are_scaled_to_usage() -> None:
    four = [CHAT_WORD] * 4
    assert streamed(four, 4) == (1, [1, 1, 1])
    assert streamed(four, 6) == (3, [1, 1, 1])  # within two: the stop token, and a token within a character
    assert streamed(four, 12) == (3, [3, 3, 3])  # speculative decoding: three tokens an event
    assert streamed(four, 10) == (3, [2, 3, 2])
    assert streamed(four, 3) == (1, [1, 1, 0])  # the last event was the text of a token counted before


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"choices":[{"message":{"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}}]}', "ab"),
        (b'{"choices":[{"index":null,"text":"x"}]}', "x"),
        (b'{"choices":null}', ""),
        (
            b'{"choices":[{"message":{"content":null,"tool_calls":[{"function":{"name":"f","arguments":{"a":1}}}]}}]}',
            "",
        ),
        (b'{"choices":[{"message":{"reasoning_content":"thought","content":"said"}}]}', "said"),
        (b'{"object":"list","data":[{"embedding":[1]}],"usage":{"prompt_tokens":3}}', ""),
    ],
)
def test_loosely_typed_fields_are_parsed(body: bytes, text: str) -> None:
    completion = parsed(reads((1, body)), stream=False)
    assert (completion.error_kind, completion.text, completion.done) == (None, text, True)


def test_sglang_response_token_ids() -> None:
    body = b'{"choices":[{"message":{"content":"ab"},"prompt_token_ids":[1,2],"response_token_ids":[3,4]}]}'
    completion = parse_body(body)
    assert (completion.prompt_token_ids, completion.token_ids) == ([1, 2], [3, 4])
