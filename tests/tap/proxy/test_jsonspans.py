"""What is asked for beside the client's request, and nothing else: additions against an oracle over decoded JSON."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engines.dialect import DialectName
from tap.ipc.settings import Injection
from tap.proxy.injectingrelay import inject
from tap.proxy.jsonspans import UnlocatableError, object_members

BOTH: frozenset[Injection] = frozenset({"usage", "token-ids"})
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(-1e9, 1e9) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
spacings = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:  ")])
flags = st.sampled_from([True, False, None, 1, "yes"])
stream_options = st.none() | st.fixed_dictionaries(
    {}, optional={"include_usage": flags, "continuous_usage_stats": flags, "x": values}
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.text(max_size=30) | st.lists(st.integers(0, 129279), max_size=9),
        "messages": st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": values}), max_size=2),
        "stream": flags,
        "stream_options": stream_options,
        "return_token_ids": flags,
        "echo": flags,
        "parallel_tool_calls": flags,
        "tools": values,
    },
)


def asked_for(fields: dict[str, Any], endpoint: str, dialect: DialectName) -> tuple[Any, frozenset[Injection]]:
    """The oracle: the request as it is to reach the engine, and what was added to it."""

    def is_unset(value: object) -> bool:
        return value is None or value is False

    prompt = ("messages",) if endpoint == CHAT else ("prompt", "prompt_embeds")
    result = json.loads(json.dumps(fields))
    added: set[Injection] = set()
    if not any(name in fields for name in prompt) or fields.get("stream") is not True:
        return result, frozenset()
    options = fields.get("stream_options") or {}
    if (
        dialect in ("vllm", "sglang")
        and is_unset(options.get("continuous_usage_stats"))
        and is_unset(options.get("include_usage"))
    ):
        result["stream_options"] = options | {"include_usage": True}
        added.add("usage")
    refused = endpoint == CHAT and (dialect == "sglang" or fields.get("parallel_tool_calls") is False)
    if (
        dialect in ("vllm", "sglang")
        and is_unset(fields.get("echo"))
        and is_unset(fields.get("return_token_ids"))
        and not refused
    ):
        result["return_token_ids"] = True
        added.add("token-ids")
    return result, frozenset(added)


@given(
    fields=requests,
    endpoint=st.sampled_from([CHAT, TEXT]),
    dialect=st.sampled_from(["vllm", "sglang", "llamacpp", "trtllm"]),
    spacing=spacings,
    padding=st.sampled_from(["", " ", "\r\n"]),
)
def test_a_request_says_what_the_client_said_and_what_was_wanted(
    fields: dict[str, Any], endpoint: str, dialect: DialectName, spacing: tuple[str, str], padding: str
) -> None:
    text = padding + json.dumps(fields, separators=spacing, ensure_ascii=not padding) + padding
    body = text.encode(errors="surrogatepass")
    injected, added = inject(body, endpoint, dialect, BOTH)
    expected, expected_added = asked_for(fields, endpoint, dialect)
    assert (json.loads(injected.decode(errors="surrogatepass")), added) == (expected, expected_added)
    if not added:
        assert injected == body
    elif "stream_options" not in fields and "return_token_ids" not in fields:
        assert injected.startswith(body.rstrip()[:-1])  # nothing that the client wrote has moved


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"x","stream":true',
        b'{"prompt":"x","stream":true,"stream":false}',
        b"[" * 100_000,
    ],
)
def test_a_body_that_is_no_plain_object_is_left_alone(body: bytes | str) -> None:
    with pytest.raises(UnlocatableError):
        inject(body if isinstance(body, bytes) else body.encode(), TEXT, "vllm", BOTH)


def test_a_name_written_with_escapes_is_the_name() -> None:
    body = b'{"prompt":"x","stre\\u0061m":true,"stream_options":{"include_us\\u0061ge":true}}'
    assert inject(body, TEXT, "vllm", BOTH)[1] == {"token-ids"}


@given(
    fields=st.dictionaries(st.text(max_size=8), values, max_size=6),
    spacing=spacings,
)
@example(fields={"a": 1, "b": 2}, spacing=(" ,\n", "\t:  "))
def test_spans_are_where_the_values_are(fields: dict[str, Any], spacing: tuple[str, str]) -> None:
    text = json.dumps(fields, separators=spacing).encode()
    try:
        members = object_members(text)
    except UnlocatableError:
        assert b"\\ud" in text  # a surrogate on its own, which is no text
        return
    assert {name: json.loads(member.value.of(text)) for name, member in members.items()} == fields


def test_a_name_of_many_escapes_costs_its_length() -> None:
    body = b'{ "' + b"\\\\" * 60_000 + b'" : 1, "b":2}'
    tracemalloc.start()
    members = object_members(body)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert members["b"].value.of(body) == b"2"
    assert peak_bytes < 5 * len(body)


@pytest.mark.parametrize(
    "body", [b"{" + b",".join(b'"n%d":0' % at for at in range(10_001)) + b"}", b'{"a":[' + b"{}," * 1_000_000 + b"0]}"]
)
def test_an_object_of_too_many_members_or_values_is_not_located(body: bytes) -> None:
    with pytest.raises(UnlocatableError):
        object_members(body)
