"""Chat messages in vLLM's form for a chat template, so that the same template gives the same prompt."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

_CONTENT_LOOP = re.compile(
    r"""\bfor\s+\w+\s+in\s+(?:\w+\.content\b|\w+\[\s*['"]content['"]\s*\]|content\b)""",
)
"""Loop over a message's content: such a template expects parts, any other a string."""

TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


class UntokenizableError(Exception):
    """The prompt has no token ids that this process can know; ``reason`` is counted and holds no content."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@lru_cache(maxsize=32)
def walks_content(template: str) -> bool:
    return _CONTENT_LOOP.search(template) is not None


def template_messages(messages: object, template: str = "") -> list[dict[str, Any]]:
    """Return the request's ``messages`` in the form of ``template``; raises UntokenizableError on all but text."""
    if not isinstance(messages, list) or not messages:
        raise UntokenizableError("no_messages")
    shaped = [_message(message, walks_content(template)) for message in messages]
    knows_developers = "'developer'" in template or '"developer"' in template
    if knows_developers or not any(message["role"] == "developer" for message in shaped):
        return shaped
    return _system_first(
        [{**message, "role": "system"} if message["role"] == "developer" else message for message in shaped]
    )


def _system_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    systems = [message for message in messages if message["role"] == "system"]
    if systems == messages[:1]:
        return messages
    texts = ["\n".join(_texts(message["content"])) for message in systems]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in messages if message["role"] != "system")]


def template_tools(tools: object) -> list[dict[str, Any]] | None:
    """Return the request's ``tools`` as an engine's request model writes them: absent descriptions become null."""
    if not isinstance(tools, list) or not tools:
        return None
    known = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise UntokenizableError("unknown_tool_kind")
        filled = {name: function.get(name) for name in ("name", "description", "parameters")}
        filled |= {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
        known.append({"type": "function", "function": filled})
    return known


def _message(message: object, as_parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UntokenizableError("malformed_message")
    role = message["role"]
    texts = _texts(message.get("content"))
    shaped: dict[str, Any] = {"role": role}
    if as_parts and role != "tool":
        shaped["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        shaped["content"] = "\n".join(texts)
    if role == "assistant":
        _add_assistant_fields(shaped, message)
    elif role == "tool" and "tool_call_id" in message:
        shaped["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        shaped["name"] = message["name"]
    return shaped


def _texts(content: object) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise UntokenizableError("malformed_message")
    return [text for part in content if (text := _part_text(part)) is not None]


def _part_text(part: object) -> str | None:
    if isinstance(part, str):
        return part
    field = TEXT_PARTS.get(part.get("type", "text")) if isinstance(part, dict) else None
    if field is None or not isinstance(part, dict):
        raise UntokenizableError("multimodal")
    text = part.get(field)
    return text if isinstance(text, str) else None


def _add_assistant_fields(shaped: dict[str, Any], message: Mapping[str, Any]) -> None:
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str):
        shaped["reasoning"] = shaped["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        shaped["tool_calls"] = [_tool_call(call) for call in calls]


def _tool_call(call: object) -> dict[str, Any]:
    """Return a call with its arguments as a mapping, for templates; the API carries them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise UntokenizableError("malformed_message")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def plain_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return a conversation as one text that grows by appending, for hashing without a tokenizer or template."""
    pieces = [f"<tools>{msgspec.json.encode(tools).decode()}\n"] if tools else []
    for message in messages:
        pieces.append(f"<{message['role']}>{message['content']}\n")
        if "tool_calls" in message:
            pieces.append(f"<calls>{msgspec.json.encode(message['tool_calls']).decode()}\n")
    return "".join(pieces)
