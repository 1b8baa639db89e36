"""Messages as an engine hands them to a template: literal cases, each agreed with vLLM 0.32's own renderer."""

from typing import Any

import pytest

from tap.prompts.chatmessages import UntokenizableError, iterates_content, template_messages, template_tools

STRINGS = "{% for m in messages %}{{ m.role }}{{ m['content'] }}{% endfor %}"
PARTS = "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "walks"),
    [
        (STRINGS, False),
        (PARTS, True),
        ("{% for x in message.contents %}{% for tool in tools %}", False),
    ],
)
def test_template_that_iterates_content_gets_parts(template: str, walks: bool) -> None:
    assert iterates_content(template) is walks


def test_content_as_string_or_parts_by_template() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    assert template_messages(messages, STRINGS) == [{"role": "user", "content": "a\nb"}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template_messages(messages, PARTS) == [{"role": "user", "content": parts}]


def test_tool_call_arguments_are_mappings_and_tool_results_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{"}}
    deep = {"id": "3", "type": "function", "function": {"name": "h", "arguments": '{"a":' * 100_000}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call, broken, deep]},
        {
            "role": "tool",
            "tool_call_id": "1",
            "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
        },
    ]
    shaped = template_messages(messages, PARTS)
    assert [each["function"]["arguments"] for each in shaped[0]["tool_calls"]] == [{"a": 1}, {}, {}]
    assert shaped[1] == {"role": "tool", "content": "x\ny", "tool_call_id": "1"}


def test_developer_role_becomes_system_without_template_support() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "developer", "content": "d"},
    ]
    assert template_messages(messages, STRINGS) == [
        {"role": "system", "content": "s\n\nd"}, {"role": "user", "content": "u"}
    ]  # fmt: skip
    assert template_messages(messages, STRINGS + "'developer'")[2] == {"role": "developer", "content": "d"}


def test_tools_as_serialised_by_the_engine() -> None:
    tools = [{"type": "function", "function": {"parameters": {}, "name": "f", "strict": None, "odd": 1}}]
    [tool] = template_tools(tools) or []
    assert list(tool["function"].items()) == [("name", "f"), ("description", None), ("parameters", {})]
    assert template_tools([]) is None


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "multimodal"),
        ([{"role": "user", "content": [7]}], "multimodal"),
        ([{"role": "user", "content": 7}], "malformed_message"),
    ],
)
def test_content_other_than_text_has_a_reason_without_content(messages: Any, reason: str) -> None:
    with pytest.raises(UntokenizableError) as caught:
        template_messages(messages, STRINGS)
    assert caught.value.reason == reason
