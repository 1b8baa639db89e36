"""An engine of fixed answers, whatever it is asked: Responses, Messages, tool calls, refusals.

The answers have the shape of vLLM 0.32's, shortened to what the official clients need to read them.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.threads import QuietHandler, serving

Json = dict[str, Any]
WORDS = ["A ", "seat ", "by ", "the ", "window"]
TEXT = "".join(WORDS)
ARGUMENTS = ['{"row":', ' "a"}']

CHAT_USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 5,
    "total_tokens": 45,
    "prompt_tokens_details": {"cached_tokens": 32},
}
RESPONSES_USAGE = {
    "input_tokens": 40,
    "input_tokens_details": {"cached_tokens": 32, "cache_write_tokens": 0},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 45,
}
# Anthropic counts what was read from the cache and written to it beside ``input_tokens``, not in it: 40 in all.
MESSAGES_USAGE = {
    "input_tokens": 6,
    "cache_read_input_tokens": 32,
    "cache_creation_input_tokens": 2,
    "output_tokens": 5,
}


@dataclass
class CannedEngine:
    """Serves from threads of its own."""

    url: str = ""
    refusals: int = 0
    """Requests yet to be refused with 429 before the next is answered."""
    seen: list[tuple[str, Json]] = field(default_factory=list)
    """Path and body of every POST."""

    @contextlib.contextmanager
    def serving(self) -> Iterator["CannedEngine"]:
        """Serve for the length of the block."""
        with serving(type("Handler", (_Handler,), {"engine": self})) as self.url:
            yield self


class _Handler(QuietHandler):
    engine: CannedEngine

    def do_GET(self) -> None:
        self._complete(404, {"error": {"message": "not here", "type": "NotFoundError"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.engine.seen.append((self.path, body))
        if self.engine.refusals:
            self.engine.refusals -= 1
            error = {"message": "too many requests", "type": "rate_limit_error"}
            self._complete(429, {"type": "error", "error": error}, {"Retry-After": "0", "X-Limit": "one"})
        elif body.get("stream"):
            self._events(_STREAMS[self.path](body))
        else:
            self._complete(200, _ANSWERS[self.path](body))

    def _complete(self, status: int, value: Json, headers: dict[str, str] | None = None) -> None:
        self.reply(status, json.dumps(value).encode(), "application/json", headers)

    def _events(self, events: list[tuple[str | None, Json | str]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for name, value in events:
            text = value if isinstance(value, str) else json.dumps(value)
            data = (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


def _tool_call(arguments: str, *, first: bool = True) -> Json:
    if not first:
        return {"index": 0, "function": {"arguments": arguments}}
    return {"index": 0, "id": "call-1", "type": "function", "function": {"name": "seat", "arguments": arguments}}


def _chat(body: Json) -> Json:
    message: Json = {"role": "assistant", "content": TEXT}
    if body.get("tools"):
        message = {"role": "assistant", "content": None, "tool_calls": [_tool_call("".join(ARGUMENTS))]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if body.get("tools") else "stop"}
    return _chat_object("chat.completion", body) | {"choices": [choice], "usage": CHAT_USAGE}


def _chat_stream(body: Json) -> list[tuple[str | None, Json | str]]:
    deltas: list[Json] = [{"role": "assistant", "content": ""}, *({"content": word} for word in WORDS)]
    if body.get("tools"):
        calls = [_tool_call(part, first=index == 0) for index, part in enumerate(ARGUMENTS)]
        deltas = [{"role": "assistant"}, *({"tool_calls": [call]} for call in calls)]
    head = _chat_object("chat.completion.chunk", body)
    finish = "tool_calls" if body.get("tools") else "stop"
    events: list[Json] = [head | {"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
    events.append(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(head | {"choices": [], "usage": CHAT_USAGE})
    return [*((None, event) for event in events), (None, "[DONE]")]


def _chat_object(kind: str, body: Json) -> Json:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": body["model"]}


def _response(body: Json, status: str = "completed", usage: Json | None = RESPONSES_USAGE) -> Json:
    content = {"type": "output_text", "text": TEXT, "annotations": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": status, "content": [content]}
    return {
        **{"id": "resp_1", "object": "response", "created_at": 1.0, "model": body["model"], "status": status},
        **{"output": [message] if usage else [], "usage": usage, "parallel_tool_calls": True, "tools": []},
        **{"tool_choice": "auto", "previous_response_id": body.get("previous_response_id")},
    }


def _response_stream(body: Json) -> list[tuple[str | None, Json | str]]:
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    position = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "", "annotations": []}
    events: list[Json] = [
        {"type": "response.created", "response": _response(body, "in_progress", None)},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.content_part.added", **position, "part": part},
        *({"type": "response.output_text.delta", **position, "delta": word, "logprobs": []} for word in WORDS),
        {"type": "response.output_text.done", **position, "text": TEXT, "logprobs": []},
        {"type": "response.completed", "response": _response(body)},
    ]
    return [(event["type"], event | {"sequence_number": number}) for number, event in enumerate(events)]


def _message(body: Json, content: list[Json], stop: str | None, usage: Json) -> Json:
    return {
        **{"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "content": content},
        **{"stop_reason": stop, "stop_sequence": None, "usage": usage},
    }


def _messages(body: Json) -> Json:
    return _message(body, [{"type": "text", "text": TEXT}], "end_turn", MESSAGES_USAGE)


def _message_stream(body: Json) -> list[tuple[str | None, Json | str]]:
    started = MESSAGES_USAGE | {"output_tokens": 0}
    events: list[Json] = [
        {"type": "message_start", "message": _message(body, [], None, started)},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in WORDS),
        {"type": "content_block_stop", "index": 0},
        {
            **{"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}},
            **{"usage": MESSAGES_USAGE},
        },
        {"type": "message_stop"},
    ]
    return [(event["type"], event) for event in events]


_ANSWERS = {
    "/v1/chat/completions": _chat,
    "/v1/responses": _response,
    "/v1/messages": _messages,
}
_STREAMS = {
    "/v1/chat/completions": _chat_stream,
    "/v1/responses": _response_stream,
    "/v1/messages": _message_stream,
}
