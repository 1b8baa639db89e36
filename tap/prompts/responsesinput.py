"""Convert a ``/v1/responses`` request to an engine's chat, so that one template path serves both.

The rules are vLLM's: instructions become the first system message; an item that continues the assistant's turn
(reasoning, a call, its words) joins the message before it; of an assistant's content only the first part counts; a
namespace's tools are named ``namespace__tool``, a free-form tool is a function of one string, and the tools that a
server would run itself are not shown to the model. What a server must look up (an earlier response, a conversation, a
stored prompt) is not in the request, so its prompt cannot be known here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tap.prompts.chatmessages import UntokenizableError

SERVER_STATE = ("previous_response_id", "conversation", "prompt", "previous_input_messages")
"""Fields that refer to state of the server; each is a reason that is counted."""
_FREE_FORM = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Description that vLLM gives the model of a free-form tool."""
_CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")

Message = dict[str, Any]


def responses_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the chat completion request with the same prompt; raises UntokenizableError."""
    for name in SERVER_STATE:
        if body.get(name) is not None:
            raise UntokenizableError(name)
    given = body.get("input")
    continued = _continues(given)
    chat: dict[str, Any] = {
        "model": body.get("model"),
        "messages": [*_instructions(body), *_messages(given)],
        "tools": list(_tools(body.get("tools"))) or None,
        "chat_template_kwargs": body.get("chat_template_kwargs"),
        "add_generation_prompt": not continued,
        "continue_final_message": continued,
    }
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    return chat


def _instructions(body: Mapping[str, Any]) -> list[Message]:
    instructions = body.get("instructions")
    return [{"role": "system", "content": instructions}] if instructions else []


def _continues(given: object) -> bool:
    """Return whether the last item is an unfinished message, which the model continues."""
    last = given[-1] if isinstance(given, list) and given else None
    if not isinstance(last, dict) or last.get("type", "message") not in ("message", "reasoning"):
        return False
    return last.get("status") in ("in_progress", "incomplete")


def _messages(given: object) -> list[Message]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise UntokenizableError("malformed_prompt")
    messages: list[Message] = []
    for item in given:
        if not isinstance(item, dict):
            raise UntokenizableError("malformed_message")
        _add_item(messages, item)
    return messages


def _add_item(messages: list[Message], item: Message) -> None:
    kind = item.get("type")
    if kind in ("function_call", "custom_tool_call"):
        _join_or_add(messages, "tool_calls", [_call(item)])
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
    """Add to the assistant's message before, if that lacks the member (calls add up); else as a new message."""
    before = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
    if before is not None and before.get(name) is None:
        before[name] = value
    elif before is not None and name == "tool_calls":
        before[name] = [*before[name], *value]
    else:
        messages.append({"role": "assistant", name: value})


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    name, namespace = item.get("name"), item.get("namespace")
    arguments = item.get("arguments")
    if item.get("type") == "custom_tool_call":
        arguments = msgspec.json.encode({"input": item.get("input") or ""}).decode()
    elif namespace:
        name = f"{namespace}__{name}"
    return {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _reasoning_text(item: Mapping[str, Any]) -> str:
    """Return the first part of the reasoning, else of its summary."""
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
    for tool in tools if isinstance(tools, list) else ():
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            yield _function(tool, tool.get("name"))
        elif kind == "custom":
            yield _function({**tool, "parameters": _FREE_FORM, "strict": None}, tool.get("name"))
        elif kind == "namespace":
            yield from (_function(inner, f"{tool.get('name')}__{inner.get('name')}") for inner in _functions(tool))


def _functions(namespace: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    inner = namespace.get("tools")
    tools = inner if isinstance(inner, list) else []
    return [tool for tool in tools if isinstance(tool, dict) and tool.get("type") == "function"]


def _function(tool: Mapping[str, Any], name: object) -> dict[str, Any]:
    fields = {field: tool.get(field) for field in ("description", "parameters", "strict", "defer_loading")}
    return {"type": "function", "function": {"name": name, **fields}}
