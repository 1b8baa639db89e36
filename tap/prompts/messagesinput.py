"""Convert an Anthropic ``/v1/messages`` request to an engine's chat, so that one template path serves both.

The rules are vLLM's. The texts of system blocks are joined without a separator, less the billing header that Claude
Code puts there. Thinking becomes reasoning, and ``tool_use`` a call. A ``tool_result`` is a message of its own before
its own message, and its images a user message after it. System messages amid the conversation stay in place, unless the
template refuses them: then they move to the first.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tap.prompts.chatmessages import UntokenizableError

_BILLING_HEADER = "x-anthropic-billing-header"

Message = dict[str, Any]
Block = Mapping[str, Any]


def messages_chat(body: Mapping[str, Any], *, system_first: bool = False) -> dict[str, Any]:
    """Return the body of the chat completion request with the same prompt; raises UntokenizableError.

    ``system_first``: all system messages are in the first one.
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
    given = body.get("system")
    system = (given if isinstance(given, str) else _system_text(given)) + ("".join(inline) if system_first else "")
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
    shaped: Message = {"role": role}
    parts: list[dict[str, Any]] = []
    for block in _list(content):
        if not isinstance(block, dict):
            raise UntokenizableError("malformed_message")
        if block.get("type") == "tool_result" and role == "user":
            yield from _tool_result(block)
        else:
            _add_block(shaped, parts, block)
    if parts:
        shaped["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    if role != "user" or parts:
        yield shaped


def _add_block(shaped: Message, parts: list[dict[str, Any]], block: Block) -> None:
    kind = block.get("type")
    if kind == "text":
        if block.get("text"):
            parts.append({"type": "text", "text": block["text"]})
    elif kind in ("image", "document"):
        parts.append({"type": "image_url", "image_url": block.get("source")})
    elif kind == "thinking":
        shaped["reasoning"] = shaped.get("reasoning", "") + str(block.get("thinking") or "")
    elif kind == "tool_use":
        shaped.setdefault("tool_calls", []).append(_call(block))
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


def _call(block: Block) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.get("input") or {}).decode()
    return {
        "id": block.get("id"),
        "type": "function",
        "function": {"name": block.get("name") or "", "arguments": arguments},
    }


def _tool(tool: object) -> dict[str, Any]:
    schema = tool.get("input_schema") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(schema, dict):
        raise UntokenizableError("unknown_tool_kind")
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    fields = {name: tool.get(name) for name in ("name", "description", "strict", "defer_loading")}
    return {"type": "function", "function": {**fields, "parameters": parameters}}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
