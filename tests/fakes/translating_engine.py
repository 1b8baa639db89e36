"""An engine that speaks the Responses and the Messages API: it asks an engine behind it as chats, all else passes."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tests.fakes.threads import QuietHandler, serving

Json = dict[str, Any]
Events = list[tuple[str, Json]]


@contextlib.contextmanager
def translating(url: str) -> Iterator[str]:
    """Serve in front of ``url`` for the length of the block; gives the base URL. Both APIs stream."""
    with (
        httpx.Client(base_url=url, timeout=30.0) as client,
        serving(type("Handler", (_Handler,), {"client": client})) as address,
    ):
        yield address


class _Handler(QuietHandler):
    client: httpx.Client

    def do_GET(self) -> None:
        self._pass_on("GET", b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path not in _APIS:
            self._pass_on("POST", body)
            return
        to_chat, to_events = _APIS[self.path]
        fields = json.loads(body)
        asked = {name: fields[name] for name in ("model", "ignore_eos", "temperature") if name in fields}
        chat = self.client.post("/v1/chat/completions", json=asked | to_chat(fields)).raise_for_status().json()
        events = to_events(chat["choices"][0]["message"]["content"], chat)
        text = "".join(f"event: {kind}\ndata: {json.dumps({'type': kind, **event})}\n\n" for kind, event in events)
        self.reply(200, text.encode(), "text/event-stream; charset=utf-8")

    def _pass_on(self, method: str, body: bytes) -> None:
        headers = {name: self.headers[name] for name in ("Content-Type", "X-Request-Id") if name in self.headers}
        answer = self.client.request(method, self.path, content=body, headers=headers)
        self.reply(answer.status_code, answer.content, answer.headers.get("content-type", "application/json"))


def _chat_of_response(fields: Json) -> Json:
    messages: list[Json] = [{"role": "system", "content": fields["instructions"]}] if "instructions" in fields else []
    for item in fields["input"]:
        if item["type"] == "message":
            messages.append({"role": item["role"], "content": item["content"]})
        elif item["type"] == "function_call":  # part of the assistant's message before it
            function = {"name": item["name"], "arguments": item["arguments"]}
            messages[-1].setdefault("tool_calls", []).append({"type": "function", "function": function})
        else:
            messages.append({"role": "tool", "content": item["output"]})
    return {"messages": messages, "max_tokens": fields["max_output_tokens"]}


def _response_events(text: str, chat: Json) -> Events:
    usage = {
        "input_tokens": chat["usage"]["prompt_tokens"],
        "input_tokens_details": chat["usage"]["prompt_tokens_details"],
        "output_tokens": chat["usage"]["completion_tokens"],
        "total_tokens": chat["usage"]["total_tokens"],
    }
    position = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    ended = {"id": "resp_1", "object": "response", "model": chat["model"], "status": "completed"}
    if chat["choices"][0]["finish_reason"] == "length":
        ended |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return [
        ("response.output_text.delta", {**position, "delta": text}),
        ("response.completed", {"response": ended | {"output": [message], "usage": usage}}),
    ]


def _chat_of_message(fields: Json) -> Json:
    messages: list[Json] = [{"role": "system", "content": fields["system"]}] if "system" in fields else []
    messages += [
        {"role": message["role"], "content": "".join(block["text"] for block in message["content"])}
        for message in fields["messages"]
    ]
    return {"messages": messages, "max_tokens": fields["max_tokens"]}


def _message_events(text: str, chat: Json) -> Events:
    cached = chat["usage"]["prompt_tokens_details"]["cached_tokens"]
    usage = {
        "input_tokens": chat["usage"]["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": chat["usage"]["completion_tokens"],
    }
    reason = {"stop": "end_turn", "length": "max_tokens"}[chat["choices"][0]["finish_reason"]]
    started = {"id": "msg_1", "type": "message", "role": "assistant", "model": chat["model"], "content": []}
    return [
        ("message_start", {"message": started | {"usage": usage | {"output_tokens": 0}}}),
        ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
        ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}}),
        ("content_block_stop", {"index": 0}),
        ("message_delta", {"delta": {"stop_reason": reason}, "usage": usage}),
        ("message_stop", {}),
    ]


_APIS: dict[str, tuple[Callable[[Json], Json], Callable[[str, Json], Events]]] = {
    "/v1/responses": (_chat_of_response, _response_events),
    "/v1/messages": (_chat_of_message, _message_events),
}
