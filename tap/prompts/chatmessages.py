"""Conversion of chat messages to the form that vLLM passes to a chat template, so that prompt token ids are equal.

Requests to ``/v1/messages`` and ``/v1/responses`` are converted to chats by vLLM's rules, so that all APIs share one
template path.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from tracefile.records.decoding import NOT_JSON

_CONTENT_LOOP = re.compile(
    r"""\bfor\s+\w+\s+in\s+(?:\w+\.content\b|\w+\[\s*['"]content['"]\s*\]|content\b)""",
)
"""Loop over a message's content: the template expects a list of parts. Other templates expect a string."""

TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


class UntokenizableError(Exception):
    """The prompt's token ids cannot be computed; ``reason`` is counted and holds no content."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@lru_cache(maxsize=32)
def iterates_content(template: str) -> bool:
    return _CONTENT_LOOP.search(template) is not None


def template_messages(messages: object, template: str = "") -> list[dict[str, Any]]:
    """Return ``messages`` in the form of ``template``; raises UntokenizableError for content other than text."""
    if not isinstance(messages, list) or not messages:
        raise UntokenizableError("no_messages")
    rendered = [_message(message, iterates_content(template)) for message in messages]
    has_developer_role = "'developer'" in template or '"developer"' in template
    if has_developer_role or not any(message["role"] == "developer" for message in rendered):
        return rendered
    return _system_first(
        [{**message, "role": "system"} if message["role"] == "developer" else message for message in rendered]
    )


def _system_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    systems = [message for message in messages if message["role"] == "system"]
    if systems == messages[:1]:
        return messages
    texts = ["\n".join(_texts(message["content"])) for message in systems]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in messages if message["role"] != "system")]


def template_tools(tools: object) -> list[dict[str, Any]] | None:
    """Return ``tools`` as serialised by an engine's request model: absent descriptions become null."""
    if not isinstance(tools, list) or not tools:
        return None
    rendered = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise UntokenizableError("unknown_tool_kind")
        filled = {name: function.get(name) for name in ("name", "description", "parameters")}
        filled |= {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
        rendered.append({"type": "function", "function": filled})
    return rendered


def _message(message: object, as_parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UntokenizableError("malformed_message")
    role = message["role"]
    texts = _texts(message.get("content"))
    rendered: dict[str, Any] = {"role": role}
    if as_parts and role != "tool":
        rendered["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        rendered["content"] = "\n".join(texts)
    if role == "assistant":
        _add_assistant_fields(rendered, message)
    elif role == "tool" and "tool_call_id" in message:
        rendered["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        rendered["name"] = message["name"]
    return rendered


def _texts(content: object) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise UntokenizableError("malformed_message")
    return [text for part in content if (text := _text_of_part(part)) is not None]


def _text_of_part(part: object) -> str | None:
    if isinstance(part, str):
        return part
    field = TEXT_PARTS.get(part.get("type", "text")) if isinstance(part, dict) else None
    if field is None or not isinstance(part, dict):
        raise UntokenizableError("multimodal")
    text = part.get(field)
    return text if isinstance(text, str) else None


def _add_assistant_fields(rendered: dict[str, Any], message: Mapping[str, Any]) -> None:
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str):
        rendered["reasoning"] = rendered["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        rendered["tool_calls"] = [_tool_call(call) for call in calls]


def _tool_call(call: object) -> dict[str, Any]:
    """Return a tool call with arguments as a mapping, for templates; in the API they are JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise UntokenizableError("malformed_message")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except NOT_JSON:
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


_BILLING_HEADER = "x-anthropic-billing-header"

Message = dict[str, Any]
Block = Mapping[str, Any]


def messages_chat(body: Mapping[str, Any], *, system_first: bool = False) -> dict[str, Any]:
    """Return the chat of a ``/v1/messages`` request; raises UntokenizableError.

    Texts of system blocks are joined without a separator, without the billing header of Claude Code. Thinking becomes
    reasoning. A ``tool_result`` becomes a tool message before its message, its images a user message after it. Later
    system messages stay in place; ``system_first`` merges them into the first, for templates that refuse them.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UntokenizableError("no_messages")
    chat: dict[str, Any] = {
        "model": body.get("model"),
        "messages": list(_chat_messages(body, messages, system_first=system_first)),
        "tools": [_tool(tool) for tool in _list(body.get("tools"))] or None,
        "chat_template_kwargs": body.get("chat_template_kwargs"),
    }
    effort = _effort(body)
    return chat if effort is None else {**chat, "reasoning_effort": effort}


def has_inline_system(body: Mapping[str, Any]) -> bool:
    return any(isinstance(message, dict) and message.get("role") == "system" for message in _list(body.get("messages")))


def _effort(body: Mapping[str, Any]) -> object:
    thinking, config = body.get("thinking"), body.get("output_config")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        return "none"
    return config.get("effort") if isinstance(config, dict) else None


def _chat_messages(body: Mapping[str, Any], messages: list[Message], *, system_first: bool) -> Iterator[Message]:
    inline = [_system_text(message.get("content")) for message in messages if message.get("role") == "system"]
    content = body.get("system")
    system = content if isinstance(content, str) else _system_text(content)
    system += "".join(inline) if system_first else ""
    if system:
        yield {"role": "system", "content": system}
    for message in messages:
        if message.get("role") != "system":
            yield from _chat_message(message)
        elif not system_first and (text := _system_text(message.get("content"))):
            yield {"role": "system", "content": text}


def _system_text(content: object) -> str:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _list(content)
    texts = [block.get("text") for block in blocks if isinstance(block, dict) and block.get("type") == "text"]
    return "".join(text for text in texts if isinstance(text, str) and not text.startswith(_BILLING_HEADER))


def _chat_message(message: Message) -> Iterator[Message]:
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    rendered: Message = {"role": role}
    parts: list[dict[str, Any]] = []
    for block in _list(content):
        if not isinstance(block, dict):
            raise UntokenizableError("malformed_message")
        if block.get("type") == "tool_result" and role == "user":
            yield from _tool_result(block)
        else:
            _add_block(rendered, parts, block)
    if parts:
        rendered["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    if role != "user" or parts:
        yield rendered


def _add_block(rendered: Message, parts: list[dict[str, Any]], block: Block) -> None:
    kind = block.get("type")
    if kind == "text":
        if block.get("text"):
            parts.append({"type": "text", "text": block["text"]})
    elif kind in ("image", "document"):
        parts.append({"type": "image_url", "image_url": block.get("source")})
    elif kind == "thinking":
        rendered["reasoning"] = rendered.get("reasoning", "") + str(block.get("thinking") or "")
    elif kind == "tool_use":
        rendered.setdefault("tool_calls", []).append(_tool_use(block))
    elif kind == "tool_result":
        parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
    elif kind not in ("redacted_thinking", "tool_reference"):
        raise UntokenizableError("unknown_block_kind")


def _tool_result(block: Block) -> Iterator[Message]:
    content = block.get("content")
    parts = [part for part in _list(content) if isinstance(part, dict)]
    texts = [str(part.get("text", "")) for part in parts if part.get("type") == "text"]
    if any(part.get("type") == "tool_reference" for part in parts):
        raise UntokenizableError("unknown_block_kind")
    text = content if isinstance(content, str) else "\n".join(texts)
    yield {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": text}
    images = [{"type": "image_url", "image_url": part.get("source")} for part in parts if part.get("type") == "image"]
    if images:
        yield {"role": "user", "content": images}


def _tool_use(block: Block) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.get("input") or {}).decode()
    return _function_call(block.get("id"), block.get("name") or "", arguments)


def _function_call(call_id: object, name: object, arguments: object) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(tool: object) -> dict[str, Any]:
    schema = tool.get("input_schema") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(schema, dict):
        raise UntokenizableError("unknown_tool_kind")
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    return _function({**tool, "parameters": parameters}, tool.get("name"))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


SERVER_STATE = ("previous_response_id", "conversation", "prompt", "previous_input_messages")
"""Fields that refer to server state; each is a reason for a prompt without token ids."""
_FREE_FORM = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters schema by which vLLM describes a free-form tool to the model."""
_CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")


def responses_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat of a ``/v1/responses`` request; raises UntokenizableError.

    Instructions become the first system message. An item that continues the assistant's turn (reasoning, tool call,
    text) is merged into the previous message; only the first part of an assistant's content is used. Tools of a
    namespace are named ``namespace__tool``, a free-form tool is a function of one string, server tools are omitted.
    """
    for name in SERVER_STATE:
        if body.get(name) is not None:
            raise UntokenizableError(name)
    request_input = body.get("input")
    continued = _continues(request_input)
    instructions = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    chat: dict[str, Any] = {
        "model": body.get("model"),
        "messages": [*instructions, *_messages(request_input)],
        "tools": list(_tools(body.get("tools"))) or None,
        "chat_template_kwargs": body.get("chat_template_kwargs"),
        "add_generation_prompt": not continued,
        "continue_final_message": continued,
    }
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    return chat


def _continues(request_input: object) -> bool:
    """Return whether the last item is an unfinished message (``continue_final_message``)."""
    last = request_input[-1] if isinstance(request_input, list) and request_input else None
    if not isinstance(last, dict) or last.get("type", "message") not in ("message", "reasoning"):
        return False
    return last.get("status") in ("in_progress", "incomplete")


def _messages(request_input: object) -> list[Message]:
    if isinstance(request_input, str):
        return [{"role": "user", "content": request_input}]
    if not isinstance(request_input, list):
        raise UntokenizableError("malformed_prompt")
    messages: list[Message] = []
    for item in request_input:
        if not isinstance(item, dict):
            raise UntokenizableError("malformed_message")
        _add_item(messages, item)
    return messages


def _add_item(messages: list[Message], item: Message) -> None:
    kind = item.get("type")
    if kind in ("function_call", "custom_tool_call"):
        _join_or_add(messages, "tool_calls", [_item_call(item)])
    elif kind == "reasoning":
        _join_or_add(messages, "reasoning", _reasoning_text(item))
    elif kind in _CALL_OUTPUTS:
        messages.append({"role": "tool", "content": _parts(item.get("output")), "tool_call_id": item.get("call_id")})
    elif item.get("role") == "assistant" and (text := _first_text(item.get("content"))) is not None:
        _join_or_add(messages, "content", text)
    elif "role" in item:
        messages.append({**item, "content": _parts(item.get("content"))})
    else:
        raise UntokenizableError("unknown_item_kind")


def _parts(content: object) -> object:
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": part.get("text")} if _is_text(part) else part for part in content]


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in ("input_text", "output_text")


def _join_or_add(messages: list[Message], name: str, value: Any) -> None:
    """Merge into the previous assistant message if it lacks the member (tool calls: append); else add a message."""
    before = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
    if before is not None and before.get(name) is None:
        before[name] = value
    elif before is not None and name == "tool_calls":
        before[name] = [*before[name], *value]
    else:
        messages.append({"role": "assistant", name: value})


def _item_call(item: Mapping[str, Any]) -> dict[str, Any]:
    name, namespace = item.get("name"), item.get("namespace")
    arguments = item.get("arguments")
    if item.get("type") == "custom_tool_call":
        arguments = msgspec.json.encode({"input": item.get("input") or ""}).decode()
    elif namespace:
        name = f"{namespace}__{name}"
    return _function_call(item.get("call_id"), name, arguments)


def _reasoning_text(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise UntokenizableError("encrypted_reasoning")
    return _first_text(item.get("content")) or _first_text(item.get("summary")) or ""


def _first_text(content: object) -> str | None:
    if isinstance(content, str):
        return content
    first = content[0] if isinstance(content, list) and content else None
    text = first.get("text") if isinstance(first, dict) else None
    return text if isinstance(text, str) else None


def _tools(tools: object) -> Iterator[dict[str, Any]]:
    for tool in _list(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            yield _function(tool, tool.get("name"))
        elif kind == "custom":
            yield _function({**tool, "parameters": _FREE_FORM, "strict": None}, tool.get("name"))
        elif kind == "namespace":
            for inner in _list(tool.get("tools")):
                if isinstance(inner, dict) and inner.get("type") == "function":
                    yield _function(inner, f"{tool.get('name')}__{inner.get('name')}")


def _function(tool: Mapping[str, Any], name: object) -> dict[str, Any]:
    fields = {field: tool.get(field) for field in ("description", "parameters", "strict", "defer_loading")}
    return {"type": "function", "function": {"name": name, **fields}}
