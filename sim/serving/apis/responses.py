"""OpenAI's ``/v1/responses`` as vLLM 0.32 speaks it: typed events with a sequence number; nothing is stored."""

from typing import Any

import msgspec

from sim.serving.apis.voice import Api, Delta, Usage, Voice, named_event
from sim.serving.engine.service import Service
from sim.serving.requests.errors import ApiError
from sim.serving.requests.fields import Asked, ContentPart, GenerationFields, choose_tools, decode_body, joined_text
from sim.serving.requests.tools import named_choice, tools_of
from sim.serving.requests.vocabulary import Message


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item of the conversation: a message, a call, a call's result."""

    type: str = "message"
    role: str = "user"
    content: str | list[ContentPart] | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | list[ContentPart] | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    previous_response_id: str | None = None
    background: bool | None = False
    cache_salt: str | None = None
    ignore_eos: bool | None = False
    seed: int | None = None
    temperature: float | None = None


class Responses(Api):
    """The API."""

    id_prefix = "resp_"

    def read(self, service: Service, body: bytes) -> Asked:
        request = decode_body(body, ResponsesRequest)
        service.check_model(request.model)
        for name in ("previous_response_id", "background"):
            if getattr(request, name):
                raise ApiError(f"{name}: this engine stores no responses", param=name)
        tools = request.tools or []
        functions = tools_of(tool for tool in tools if tool.get("type") == "function")
        offered, choice = choose_tools(functions, _choice(request.tool_choice))
        fields = GenerationFields(
            model=request.model,
            stream=request.stream,
            cache_salt=request.cache_salt,
            ignore_eos=request.ignore_eos,
            seed=request.seed,
            temperature=request.temperature,
        )
        prompt = service.vocabulary.render_chat(_messages(request), tools, generation_prompt=True)
        limit = request.max_output_tokens
        return Asked(fields=fields, prompts=[prompt], max_tokens=limit, tools=offered, tool_choice=choice)

    def voice(self, service: Service, asked: Asked, response_id: str, created_s: int) -> Voice:
        return ResponsesVoice(service, asked, response_id, created_s)


class ResponsesVoice(Voice):
    """Words one response, whose output is one item."""

    def __init__(self, service: Service, asked: Asked, response_id: str, created_s: int) -> None:
        self._vocabulary = service.vocabulary
        self._response = {
            "id": response_id,
            "object": "response",
            "created_at": created_s,
            "model": service.model_name,
            "instructions": None,
            "incomplete_details": None,
            "metadata": None,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "tool_choice": asked.tool_choice,
            "tools": [
                {"type": "function", "name": tool.name, "parameters": tool.parameters, "strict": None}
                for tool in asked.tools
            ],
            "background": False,
            "max_output_tokens": asked.max_tokens,
            "previous_response_id": None,
            "service_tier": "auto",
            "truncation": "disabled",
        }
        self._item_id = f"msg_{response_id.removeprefix('resp_')}"
        self._sequence = 0
        self._pieces: list[str] = []
        self._item: dict[str, Any] | None = None
        """The output item as it was added; None: not yet."""
        self._finish_reason = "stop"

    def opening(self) -> bytes:
        begun = {"response": self._response | {"status": "in_progress", "output": [], "usage": None}}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def delta(self, delta: Delta, usage: Usage | None) -> bytes:
        self._finish_reason = delta.finish_reason or self._finish_reason
        call = delta.generation.output.call
        piece = delta.text(self._vocabulary) if call is None else delta.arguments(self._vocabulary)
        self._pieces.append(piece)
        events = b""
        if self._item is None and (piece or delta.names_tool):
            events = self._add_item(delta)
        if piece and call is None:
            events += self._event("response.output_text.delta", self._place() | {"delta": piece, "logprobs": []})
        elif piece:
            place = {"output_index": 0, "item_id": self._item_id}
            events += self._event("response.function_call_arguments.delta", place | {"delta": piece})
        return events

    def closing(self, usage: Usage) -> bytes:
        """Everything once more, complete. As from vLLM it is ``response.completed`` even where the length ended it."""
        events, output = b"", []
        if self._item is not None:
            item = self._whole_item("".join(self._pieces))
            events, output = self._finish_item(item), [item]
        return events + self._event("response.completed", {"response": self._ended(output, usage)})

    def whole(self, deltas: list[Delta], usage: Usage) -> bytes:
        [delta] = deltas
        self._finish_reason = delta.finish_reason or "stop"
        self._add_item(delta)
        call = delta.generation.output.call
        text = delta.text(self._vocabulary) if call is None else delta.arguments(self._vocabulary)
        return msgspec.json.encode(self._ended([self._whole_item(text)], usage))

    def _add_item(self, delta: Delta) -> bytes:
        call = delta.generation.output.call
        if call is not None:
            self._item_id = f"fc_{self._item_id.removeprefix('msg_')}"
            called = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": ""}
            self._item = {"id": self._item_id, **called, "status": "in_progress"}
            return self._event("response.output_item.added", {"output_index": 0, "item": self._item})
        self._item = {"id": self._item_id, "type": "message", "role": "assistant"}
        self._item |= {"content": [], "status": "in_progress"}
        added = self._event("response.output_item.added", {"output_index": 0, "item": self._item})
        return added + self._event("response.content_part.added", self._place() | {"part": _part("")})

    def _finish_item(self, item: dict[str, Any]) -> bytes:
        text = "".join(self._pieces)
        if item["type"] == "function_call":
            ended = {"output_index": 0, "item_id": self._item_id, "arguments": text, "name": item["name"]}
            events = self._event("response.function_call_arguments.done", ended)
        else:
            events = self._event("response.output_text.done", self._place() | {"text": text, "logprobs": []})
            events += self._event("response.content_part.done", self._place() | {"part": _part(text)})
        return events + self._event("response.output_item.done", {"output_index": 0, "item": item})

    def _whole_item(self, text: str) -> dict[str, Any]:
        assert self._item is not None
        item = self._item | {"status": "completed" if self._finish_reason == "stop" else "incomplete"}
        return item | ({"arguments": text} if item["type"] == "function_call" else {"content": [_part(text)]})

    def _ended(self, output: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        complete = self._finish_reason == "stop"
        return self._response | {
            "status": "completed" if complete else "incomplete",
            "incomplete_details": None if complete else {"reason": "max_output_tokens"},
            "output": output,
            "usage": _usage_fields(usage),
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        event = named_event(kind, {"sequence_number": self._sequence, **fields})
        self._sequence += 1
        return event


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _messages(request: ResponsesRequest) -> list[Message]:
    messages = [] if request.instructions is None else [Message(role="system", text=request.instructions)]
    if isinstance(request.input, str):
        return [*messages, Message(role="user", text=request.input)]
    if not request.input:
        raise ApiError("input: must not be empty", param="input")
    for item in request.input:
        if item.type == "message":
            messages.append(Message(role=item.role, text=joined_text(item.content, "input")))
        elif item.type == "function_call":
            function = {"name": item.name or "", "arguments": item.arguments or ""}
            call = {"id": item.call_id, "type": "function", "function": function}
            # A call is part of the assistant's message before it, if there is one.
            speaks = bool(messages) and messages[-1].role == "assistant"
            said = messages.pop() if speaks else Message(role="assistant", text="")
            messages.append(msgspec.structs.replace(said, tool_calls=(*said.tool_calls, call)))
        elif item.type == "function_call_output":
            messages.append(Message(role="tool", text=joined_text(item.output, "input")))
        elif item.type != "reasoning":
            raise ApiError(f"an input item of type {item.type!r}: this engine reads messages and calls", param="input")
    return messages


def _choice(choice: Any) -> str | None:
    return choice if choice is None or isinstance(choice, str) else named_choice(choice)
