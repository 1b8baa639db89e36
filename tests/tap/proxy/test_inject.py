"""What is asked for beside the client's request, and nothing else: additions against an oracle over decoded JSON."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.dialect import DialectName
from tap.ipc.settings import Injection
from tap.proxy.injectingrelay import inject
from tracefile.records.decoding import NOT_JSON

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


def requested_fields(fields: dict[str, Any], endpoint: str, dialect: DialectName) -> tuple[Any, frozenset[Injection]]:
    """The oracle: the request as it is to reach the engine, and what was added to it."""

    prompt = ("messages",) if endpoint == CHAT else ("prompt", "prompt_embeds")
    result = json.loads(json.dumps(fields))
    added: set[Injection] = set()
    if not any(name in fields for name in prompt) or fields.get("stream") is not True:
        return result, frozenset()
    if dialect in ("vllm", "sglang") and "stream_options" not in fields:
        result["stream_options"] = {"include_usage": True}
        added.add("usage")
    refused = endpoint == CHAT and (dialect == "sglang" or fields.get("parallel_tool_calls") is False)
    if (
        dialect in ("vllm", "sglang")
        and fields.get("echo") in (None, False)
        and "return_token_ids" not in fields
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
def test_injected_request_body(
    fields: dict[str, Any], endpoint: str, dialect: DialectName, spacing: tuple[str, str], padding: str
) -> None:
    text = padding + json.dumps(fields, separators=spacing, ensure_ascii=not padding) + padding
    body = text.encode(errors="surrogatepass")
    injected, added = inject(body, endpoint, dialect, BOTH)
    expected, expected_added = requested_fields(fields, endpoint, dialect)
    assert (json.loads(injected.decode(errors="surrogatepass")), added) == (expected, expected_added)
    if not added:
        assert injected == body
    assert injected.startswith(body.rstrip()[:-1])  # nothing that the client wrote has moved


@pytest.mark.parametrize("body", [b'{"prompt":"x","stream":true', b"[" * 100_000])
def test_body_that_is_not_an_object_is_unchanged(body: bytes) -> None:
    with pytest.raises(NOT_JSON):
        inject(body, TEXT, "vllm", BOTH)


def test_escaped_and_duplicate_member_names() -> None:
    body = b'{"prompt":"x","stream":false,"stre\\u0061m":true,"stream_opti\\u006fns":null}'
    assert inject(body, TEXT, "vllm", BOTH)[1] == {"token-ids"}
