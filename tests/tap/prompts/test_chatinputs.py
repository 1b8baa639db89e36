"""Responses and Messages requests as the chats that vLLM 0.32 makes of them: cases that its own code agrees with."""

from typing import Any

import pytest

from tap.prompts.chatmessages import (
    UntokenizableError,
    has_inline_system,
    messages_chat,
    responses_chat,
    template_messages,
    template_tools,
)

STRINGS = "{% for m in messages %}{{ m.role }}{{ m['content'] }}{% endfor %}"


def rendered(chat: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages as a template sees them."""
    return template_messages(chat["messages"], STRINGS)


def call(name: str, arguments: dict[str, Any], call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_text_input_is_a_user_message_after_instructions() -> None:
    chat = responses_chat({"model": "m", "input": "hi", "instructions": "be", "reasoning": {"effort": "low"}})
    assert rendered(chat) == [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    assert (chat["add_generation_prompt"], chat["tools"], chat["reasoning_effort"]) == (True, None, "low")


def test_items_of_an_assistant_turn_are_merged() -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"text": "short"}], "content": [{"type": "reasoning_text", "text": "long"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "2", "name": "h", "namespace": "ns", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "sunk"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "afloat"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]},
        {"type": "message", "role": "assistant", "content": [{"text": "one"}, {"text": "two"}]},
        {"role": "assistant", "content": "three"},
        {"type": "custom_tool_call", "call_id": "3", "name": "free", "input": "as é is"},
        {"type": "custom_tool_call_output", "call_id": "3", "output": "done"},
    ]
    thought = {"reasoning": "long", "reasoning_content": "long"}
    assert rendered(responses_chat({"input": items})) == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            **thought,
            "tool_calls": [call("f", {"a": 1}, "1"), call("ns__h", {}, "2")],
        },
        {"role": "tool", "content": "sunk", "tool_call_id": "1"},
        {"role": "tool", "content": "afloat", "tool_call_id": "2"},
        {"role": "assistant", "content": "one", "reasoning": "short", "reasoning_content": "short"},
        {"role": "assistant", "content": "three", "tool_calls": [call("free", {"input": "as é is"}, "3")]},
        {"role": "tool", "content": "done", "tool_call_id": "3"},
    ]


def test_unfinished_message_is_continued() -> None:
    last = {"type": "message", "role": "assistant", "status": "incomplete", "content": [{"text": "par"}]}
    chat = responses_chat({"input": [{"role": "user", "content": "x"}, last]})
    assert (chat["add_generation_prompt"], chat["continue_final_message"]) == (False, True)


def test_responses_tools() -> None:
    tools = [
        {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
        {"type": "web_search"},
        {"type": "custom", "name": "free", "description": "any"},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "h"}, {"type": "custom"}]},
    ]
    shown = [tool["function"] for tool in template_tools(responses_chat({"input": "x", "tools": tools})["tools"]) or []]
    assert [list(function) for function in shown] == [
        ["name", "description", "parameters", "strict"], *[["name", "description", "parameters"]] * 2
    ]  # fmt: skip
    assert [function["name"] for function in shown] == ["f", "free", "ns__h"]
    assert shown[1]["parameters"]["required"] == ["input"]


def test_system_blocks_are_joined_without_the_billing_header() -> None:
    blocks = ["x-anthropic-billing-header: cc_version=1", "You are ", "terse."]
    body = {
        "system": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in blocks],
        "messages": [{"role": "user", "content": "hi"}],
    }
    assert rendered(messages_chat(body))[0] == {"role": "system", "content": "You are terse."}


def test_content_blocks_become_parts_calls_reasoning_and_tool_messages() -> None:
    result = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": ""}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "zz"},
                {"type": "text", "text": "go"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "sunk"},
                {"type": "text", "text": "and"},
                {"type": "tool_result", "tool_use_id": "2", "content": result},
                {"type": "text", "text": "then"},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "2"}]},
    ]
    thought = {"reasoning": "hm", "reasoning_content": "hm"}
    assert rendered(messages_chat({"messages": messages})) == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "go", **thought, "tool_calls": [call("f", {"a": 1}, "1"), call("g", {}, "2")]},
        {"role": "tool", "content": "sunk", "tool_call_id": "1"},
        {"role": "tool", "content": "x\ny", "tool_call_id": "2"},
        {"role": "user", "content": "and\nthen"},
        {"role": "tool", "content": "", "tool_call_id": "2"},
    ]


def test_later_system_messages_stay_or_merge_into_the_first() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "late"},
        {"role": "user", "content": "b"},
    ]
    body = {"system": "first,", "messages": messages}
    assert [message["role"] for message in rendered(messages_chat(body))] == ["system", "user", "system", "user"]
    assert rendered(messages_chat(body, system_first=True)) == [
        {"role": "system", "content": "first,late"}, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    ]  # fmt: skip
    assert has_inline_system(body)
    assert not has_inline_system({"system": "first", "messages": messages[:1]})


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, None),
        ({"output_config": {"effort": "high"}}, "high"),
    ],
)
def test_reasoning_effort(fields: dict[str, Any], effort: str | None) -> None:
    assert messages_chat({"messages": [], **fields}).get("reasoning_effort") == effort


def test_anthropic_tools_as_openai_tools() -> None:
    tools = [{"name": "f", "input_schema": {"properties": {}}, "description": "d", "strict": True}]
    assert template_tools(messages_chat({"messages": [], "tools": tools})["tools"]) == [
        {
            "type": "function",
            "function": {
                "name": "f", "description": "d", "parameters": {"properties": {}, "type": "object"}, "strict": True
            },
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": "x"}, "no_messages"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "malformed_message"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_addition"}]}]}, "unknown_block_kind"),
        ({"messages": [], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "unknown_tool_kind"),
    ],
)
def test_unconvertible_requests_have_a_reason_without_content(body: dict[str, Any], reason: str) -> None:
    with pytest.raises(UntokenizableError) as caught:
        messages_chat(body)
    assert caught.value.reason == reason
