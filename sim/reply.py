"""One request's answer over HTTP, as it is made: an ASGI endpoint for each of OpenAI's two dialects.

A streamed token is one ``send`` from one task, without a response class, a queue or a generator in between.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from sim import openai
from sim.openai import ApiError, Delta, GenerationFields, Usage
from sim.realtime import Generation
from sim.service import Service

JSON = "application/json"
DONE = b"data: [DONE]\n\n"


class Bell:
    """Wakes the one task that writes a response; rings while it is awake are remembered."""

    __slots__ = ("_rung", "_waiter")

    def __init__(self) -> None:
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """There is something to write."""
        self._rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return once it has rung since the last time."""
        if not self._rung:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._rung = False


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one endpoint reads its body and words its answers."""

    id_prefix: str
    chunk_kind: str
    response_kind: str
    read: Callable[[Service, bytes], tuple[GenerationFields, list[list[int]], int | None]]
    """Body to fields, prompts and max_tokens. Raises ApiError."""
    chunk: Callable[..., bytes]
    choice: Callable[..., dict[str, Any]]
    names_role: bool
    """A choice's first chunk carries its role."""


def read_completion(service: Service, body: bytes) -> tuple[GenerationFields, list[list[int]], int | None]:
    """Body of ``/v1/completions``."""
    request = openai.decode_body(body, openai.CompletionRequest)
    service.check_model(request.model)
    prompts = openai.decode_prompts(request.prompt, service.vocabulary)
    max_tokens = request.max_tokens
    return request, prompts, openai.DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens


def read_chat(service: Service, body: bytes) -> tuple[GenerationFields, list[list[int]], int | None]:
    """Body of ``/v1/chat/completions``."""
    request = openai.decode_body(body, openai.ChatRequest)
    service.check_model(request.model)
    if not request.messages:
        raise ApiError("messages: must not be empty", param="messages")
    messages = [message.joined() for message in request.messages]
    answer = request.add_generation_prompt is not False
    prompt = service.vocabulary.render_chat(messages, request.tools or [], answer=answer)
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return request, [prompt], max_tokens


COMPLETION = Dialect(
    "cmpl-",
    "text_completion",
    "text_completion",
    read_completion,
    openai.completion_chunk,
    openai.completion_choice,
    names_role=False,
)
CHAT = Dialect(
    "chatcmpl-",
    "chat.completion.chunk",
    "chat.completion",
    read_chat,
    openai.chat_chunk,
    openai.chat_choice,
    names_role=True,
)


class GenerationEndpoint:
    """An ASGI endpoint that answers in one dialect, streaming or not, and aborts when its client leaves."""

    def __init__(self, service: Service, dialect: Dialect) -> None:
        self._service = service
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request from body to last byte."""
        engine = self._service.engine
        arrival_ms = engine.clock_ms()
        body = await _read_body(receive)
        if body is None:
            return
        bell = Bell()
        try:
            fields, prompts, max_tokens = self._dialect.read(self._service, body)
            if fields.stream_options is not None and not fields.stream:
                raise ApiError("stream_options: only with stream = true", param="stream_options")
            generations = self._service.plan(fields, prompts, max_tokens, bell.ring)
        except ApiError as error:
            await _send_whole(send, error.status, error.body())
            return
        response = GenerationResponse(
            self._service, self._dialect, fields, prompts, generations, request_id=_request_id(scope)
        )
        for generation in generations:
            engine.submit(generation, arrival_ms)
        watch = asyncio.create_task(self._watch(receive, generations))
        try:
            if fields.stream:
                await response.stream(bell, send)
            else:
                await response.whole(bell, send)
        finally:
            watch.cancel()
            self._abort(generations)

    async def _watch(self, receive: Receive, generations: Sequence[Generation]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._abort(generations)

    def _abort(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            self._service.engine.abort(generation)


class GenerationResponse:
    """What one request's client has been told, and what is still to tell."""

    def __init__(
        self,
        service: Service,
        dialect: Dialect,
        fields: GenerationFields,
        prompts: Sequence[list[int]],
        generations: Sequence[Generation],
        *,
        request_id: str,
    ) -> None:
        self._vocabulary = service.vocabulary
        self._model_name = service.model_name
        self._dialect = dialect
        self._with_ids = bool(fields.return_token_ids)
        self._options = fields.stream_options or openai.StreamOptions()
        self._prompts = prompts
        self._choices = len(generations) // len(prompts)
        self._generations = generations
        self._told = [0] * len(generations)
        self._id = dialect.id_prefix + request_id
        self._created_s = int(time.time())

    async def stream(self, bell: Bell, send: Send) -> None:
        """Chunks as tokens come. An answer that is aborted ends without its end, as a dead engine's would."""
        head = openai.chunk_head(self._id, self._dialect.chunk_kind, self._created_s, self._model_name)
        await send(_start(200, "text/event-stream; charset=utf-8"))
        open_choices = len(self._generations)
        while open_choices:
            await bell.wait()
            events = []
            for index, generation in enumerate(self._generations):
                if generation.outcome == "aborted":
                    return
                if generation.delivered > self._told[index]:
                    events.append(self._events(head, index, generation))
                    open_choices -= generation.outcome is not None
            if events and open_choices:
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
        if self._options.include_usage:
            events.append(openai.usage_chunk(head, self._usage(with_cached=True)))
        await send({"type": "http.response.body", "body": b"".join([*events, DONE])})

    async def whole(self, bell: Bell, send: Send) -> None:
        """The response in one piece, when every choice has ended."""
        while any(generation.outcome is None for generation in self._generations):
            await bell.wait()
        if any(generation.outcome == "aborted" for generation in self._generations):
            return
        deltas = [self._delta(index, generation) for index, generation in enumerate(self._generations)]
        fields: dict[str, Any] = {
            "id": self._id,
            "object": self._dialect.response_kind,
            "created": self._created_s,
            "model": self._model_name,
            "choices": [self._dialect.choice(delta, with_ids=self._with_ids) for delta in deltas],
            "usage": self._usage(with_cached=True).fields(),
        }
        if self._dialect.names_role:
            fields["prompt_token_ids"] = self._prompts[0] if self._with_ids else None
        await _send_whole(send, 200, msgspec.json.encode(fields))

    def _events(self, head: bytes, index: int, generation: Generation) -> bytes:
        first = self._told[index] == 0
        continuous = bool(self._options.continuous_usage_stats)
        role = b""
        if first and self._dialect.names_role:
            prompt_ids = self._prompts[0] if self._with_ids and index == 0 else None
            usage = self._usage(with_cached=False) if continuous else None
            role = openai.role_chunk(head, Delta(index, "", [], None, prompt_ids), usage=usage)
        delta = self._delta(index, generation)
        usage = self._usage(with_cached=False) if continuous else None
        return role + self._dialect.chunk(head, delta, with_ids=self._with_ids, usage=usage)

    def _delta(self, index: int, generation: Generation) -> Delta:
        """What was not told yet; from here on it is."""
        told, self._told[index] = self._told[index], generation.delivered
        token_ids = generation.answer.token_ids[told : generation.delivered]
        finish_reason = generation.answer.finish_reason if generation.outcome == "finished" else None
        spoken = token_ids[:-1] if finish_reason == "stop" else token_ids
        prompt_ids = self._prompts[index // self._choices] if self._with_ids and told == 0 else None
        return Delta(index, self._vocabulary.decode(spoken), token_ids, finish_reason, prompt_ids)

    def _usage(self, *, with_cached: bool) -> Usage:
        firsts = self._generations[:: self._choices]
        cached = sum(generation.request.cached_tokens or 0 for generation in firsts) if with_cached else None
        return Usage(sum(map(len, self._prompts)), sum(self._told), cached)


async def _read_body(receive: Receive) -> bytes | None:
    """The whole request body; None if the client left before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _request_id(scope: Scope) -> str:
    """The client's X-Request-Id, as vLLM takes it, or one of ours."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            with contextlib.suppress(UnicodeDecodeError):
                return str(value.decode("ascii"))
    return secrets.token_hex(16)


def _start(status: int, content_type: str, length: int | None = None) -> dict[str, Any]:
    headers = [(b"content-type", content_type.encode())]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _send_whole(send: Send, status: int, body: bytes) -> None:
    await send(_start(status, JSON, len(body)))
    await send({"type": "http.response.body", "body": body})
