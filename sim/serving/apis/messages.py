"""Anthropic's ``/v1/messages`` as vLLM 0.32 speaks it: content blocks in named events, calls of tools included."""

from typing import Any

import msgspec

from sim.serving.apis.voice import Api, Delta, Usage, Voice, named_event
from sim.serving.engine.service import Service
from sim.serving.requests.errors import ApiError
from sim.serving.requests.fields import Asked, ContentPart, GenerationFields, choose_tools, decode_body, joined_text
from sim.serving.requests.tools import Tool
from sim.serving.requests.vocabulary import Message

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class Block(ContentPart, frozen=True, kw_only=True):
    """A content block of a message."""

    id: str | None = None
    name: str | None = None
    input: Any = None
    content: "str | list[Block] | None" = None


class MessagesMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message as sent."""

    role: str
    content: str | list[Block]


class MessagesTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as offered."""

    name: str
    description: str | None = None
    input_schema: Any = None


class MessagesToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Return whether a tool must be called."""

    type: str
    name: str | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``/v1/messages/count_tokens``, and what the other one has in common with it."""

    model: str | None = None
    messages: list[MessagesMessage]
    system: str | list[Block] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """The body."""

    max_tokens: int
    stream: bool | None = False
    temperature: float | None = None
    cache_salt: str | None = None


class Messages(Api):
    """The API."""

    id_prefix = "chatcmpl-"
    """vLLM's messages are chats underneath, and say so."""

    def read(self, service: Service, body: bytes) -> Asked:
        request = decode_body(body, MessagesRequest)
        service.check_model(request.model)
        prompt = render(service, request)
        tools = [Tool(tool.name, tool.input_schema) for tool in request.tools or ()]
        offered, choice = choose_tools(tools, _choice(request.tool_choice))
        fields = GenerationFields(
            model=request.model,
            stream=request.stream,
            temperature=request.temperature,
            cache_salt=request.cache_salt,
        )
        return Asked(fields=fields, prompts=[prompt], max_tokens=request.max_tokens, tools=offered, tool_choice=choice)

    def voice(self, service: Service, asked: Asked, response_id: str, created_s: int) -> Voice:
        return MessagesVoice(service, asked, response_id)

    def error(self, error: ApiError) -> bytes:
        return error.messages_body()

    def count_tokens(self, service: Service, body: bytes) -> int:
        """Return the prompt tokens of a body. Raises ApiError."""
        request = decode_body(body, CountRequest)
        service.check_model(request.model)
        return len(render(service, request))


def render(service: Service, request: CountRequest) -> list[int]:
    """The prompt's ids. Raises ApiError for a block that is neither text nor of a tool."""
    if not request.messages:
        raise ApiError("messages: must not be empty", param="messages")
    messages = [] if request.system is None else [Message(role="system", text=joined_text(request.system, "messages"))]
    for message in request.messages:
        messages += _messages(message)
    tools = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
        }
        for tool in request.tools or ()
    ]
    return service.vocabulary.render_chat(messages, tools, generation_prompt=True)


class MessagesVoice(Voice):
    """Words one response, which has one choice."""

    def __init__(self, service: Service, asked: Asked, response_id: str) -> None:
        self._vocabulary = service.vocabulary
        self._message: dict[str, Any] = {
            "id": response_id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": service.model_name,
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._prompt_tokens = sum(map(len, asked.prompts))
        self._block_open = False
        self._stop_reason = "end_turn"

    def delta(self, delta: Delta, usage: Usage | None) -> bytes:
        events = []
        if delta.start == 0:
            counts = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
            events.append(named_event("message_start", {"message": self._message | {"usage": counts}}))
        call = delta.generation.output.call
        if call is None:
            said = {"type": "text_delta", "text": delta.text(self._vocabulary)}
            empty: dict[str, Any] = {"type": "text", "text": ""}
            is_empty = not said["text"]
        else:
            said = {"type": "input_json_delta", "partial_json": delta.arguments(self._vocabulary)}
            empty = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
            is_empty = not said["partial_json"]
        if not self._block_open and (delta.names_tool or not is_empty):
            self._block_open = True
            events.append(named_event("content_block_start", {"index": 0, "content_block": empty}))
        if not is_empty:
            events.append(named_event("content_block_delta", {"index": 0, "delta": said}))
        if delta.finish_reason is not None:
            self._stop_reason = _stop_reason(delta)
        return b"".join(events)

    def closing(self, usage: Usage) -> bytes:
        stop = named_event("content_block_stop", {"index": 0}) if self._block_open else b""
        ended = {"stop_reason": self._stop_reason, "stop_sequence": None}
        end = named_event("message_delta", {"delta": ended, "usage": usage_fields(usage)})
        return stop + end + named_event("message_stop", {})

    def whole(self, deltas: list[Delta], usage: Usage) -> bytes:
        [delta] = deltas
        call = delta.generation.output.call
        block: dict[str, Any] = {"type": "text", "text": "" if call else delta.text(self._vocabulary)}
        if call is not None:
            # Arguments that were cut short are no JSON: then there is no input to tell of.
            whole = delta.finish_reason == "stop"
            given = msgspec.json.decode(call.arguments) if whole else {}
            block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": given}
        said = {"content": [block], "stop_reason": _stop_reason(delta), "usage": usage_fields(usage)}
        return msgspec.json.encode(self._message | said)


def usage_fields(usage: Usage) -> dict[str, int]:
    """Anthropic counts what was read from the cache beside ``input_tokens``, not in it."""
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _stop_reason(delta: Delta) -> str:
    if delta.finish_reason == "stop" and delta.generation.output.call is not None:
        return "tool_use"
    return STOP_REASONS[delta.finish_reason or "stop"]


def _choice(choice: MessagesToolChoice | None) -> str | None:
    if choice is None or choice.type in ("auto", "none"):
        return None if choice is None else choice.type
    if choice.type == "any":
        return "required"
    if choice.type == "tool" and choice.name:
        return choice.name
    raise ApiError("tool_choice: expected auto, any, none, or tool with a name", param="tool_choice")


def _messages(message: MessagesMessage) -> list[Message]:
    """A message's text with its calls, and each result of a tool as a message of its own, before it."""
    if isinstance(message.content, str):
        return [Message(role=message.role, text=message.content)]
    blocks = message.content
    results = [
        Message(role="tool", text=joined_text(one.content, "messages")) for one in blocks if one.type == "tool_result"
    ]
    rest = [block for block in blocks if block.type != "tool_result"]
    calls = tuple(
        {"function": {"name": block.name or "", "arguments": msgspec.json.encode(block.input or {}).decode()}}
        for block in rest
        if block.type == "tool_use"
    )
    said = [block for block in rest if block.type not in ("tool_use", "thinking", "redacted_thinking")]
    if rest:
        results.append(Message(role=message.role, text=joined_text(said, "messages"), tool_calls=calls))
    return results
