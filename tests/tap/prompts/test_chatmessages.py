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
def test_a_template_that_walks_over_content_gets_parts(template: str, walks: bool) -> None:
    assert iterates_content(template) is walks


def test_content_is_joined_for_one_template_and_kept_apart_for_the_other() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    assert template_messages(messages, STRINGS) == [{"role": "user", "content": "a\nb"}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template_messages(messages, PARTS) == [{"role": "user", "content": parts}]


def test_tool_calls_carry_their_arguments_as_a_mapping_and_tool_results_are_text() -> None:
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


def test_developers_are_system_where_the_template_knows_none_and_the_system_speaks_first() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "developer", "content": "d"},
    ]
    assert template_messages(messages, STRINGS) == [
        {"role": "system", "content": "s\n\nd"}, {"role": "user", "content": "u"}
    ]  # fmt: skip
    assert template_messages(messages, STRINGS + "'developer'")[2] == {"role": "developer", "content": "d"}


def test_tools_are_written_as_the_engines_request_model_writes_them() -> None:
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
def test_what_is_not_text_is_named_and_never_quoted(messages: Any, reason: str) -> None:
    with pytest.raises(UntokenizableError) as caught:
        template_messages(messages, STRINGS)
    assert caught.value.reason == reason
