"""The HTTP face of the real-time engine: OpenAI's endpoints and vLLM's own.

Answers are ASGI endpoints of their own inside FastAPI's application: a streamed token is one ``send`` from one task,
without a response class, a queue or a generator in between.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from sim import openai
from sim.answer import AnswerLimits, draw_answer
from sim.exposition import Exposition
from sim.openai import ApiError, Delta, GenerationFields, Usage
from sim.realtime import Generation, RealTimeEngine
from sim.request import Request as EngineRequest
from sim.vocabulary import Vocabulary
from tracefile import BlockHasher, HashKey

JSON = "application/json"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What every endpoint shares."""

    engine: RealTimeEngine
    vocabulary: Vocabulary
    model_name: str
    max_model_len: int
    version: str
    seed: int
    median_answer_tokens: float
    hash_key: HashKey
    """Of this process alone: block keys never leave it."""

    def check_model(self, name: str | None) -> None:
        """Raise ApiError unless it is the served model, or none was named."""
        if name is not None and name != self.model_name:
            raise ApiError(f"The model `{name}` does not exist.", status=404, kind="NotFoundError", param="model")

    def plan(
        self, fields: GenerationFields, prompts: Sequence[list[int]], max_tokens: int | None, on_progress: "Bell"
    ) -> list[Generation]:
        """A generation for each choice of each prompt, nothing submitted yet. Raises ApiError for what cannot be."""
        choices = fields.n or 1
        if choices < 1 or (max_tokens is not None and max_tokens < 1):
            raise ApiError(f"n and max_tokens must be at least 1, got {fields.n} and {max_tokens}")
        if max_tokens is not None and (fields.min_tokens or 0) > max_tokens:
            raise ApiError(f"min_tokens ({fields.min_tokens}) must not exceed max_tokens ({max_tokens})")
        planned = []
        for prompt in prompts:
            limits = self._limits(fields, len(prompt), max_tokens)
            planned += [self._generation(fields, prompt, limits, choice, on_progress) for choice in range(choices)]
        return planned

    def _limits(self, fields: GenerationFields, prompt_tokens: int, max_tokens: int | None) -> AnswerLimits:
        room = self.max_model_len - prompt_tokens
        if room < 1:
            raise ApiError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt has "
                f"{prompt_tokens} tokens, which leaves no room for an answer.",
                param="prompt",
            )
        return AnswerLimits(
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            min_tokens=fields.min_tokens or 0,
            ignore_eos=bool(fields.ignore_eos),
            median_tokens=self.median_answer_tokens,
        )

    def _generation(
        self, fields: GenerationFields, prompt: list[int], limits: AnswerLimits, choice: int, on_progress: "Bell"
    ) -> Generation:
        prompt_ids = np.array(prompt, dtype="<u4")
        seed = self.seed if fields.seed is None else self.seed ^ (fields.seed + 1)
        answer = draw_answer(prompt_ids.tobytes(), self.vocabulary, limits, seed, choice)
        # The last token's KV is never computed, so it fills no block.
        computed = np.concatenate([prompt_ids, np.array(answer.token_ids[:-1], dtype="<u4")])
        hasher = BlockHasher(
            self.hash_key, block_size=self.engine.scheduler.config.block_size, cache_salt=fields.cache_salt
        )
        request = EngineRequest(
            request_id=secrets.token_hex(8),
            prompt_tokens=len(prompt),
            output_tokens=len(answer.token_ids),
            hashes=[int(key) for key in hasher.hash_blocks(computed)],
            max_tokens=limits.max_tokens,
        )
        return Generation(request, answer, on_progress.ring)


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
            generations = self._service.plan(fields, prompts, max_tokens, bell)
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


def make_app(service: Service) -> FastAPI:
    """The application over one running engine."""
    app = FastAPI(title="kvtape sim serve", version=service.version, openapi_url=None)
    exposition = Exposition(service.engine, service.model_name)
    app.router.add_route("/v1/completions", GenerationEndpoint(service, COMPLETION), methods=["POST"])  # type: ignore[arg-type]
    app.router.add_route("/v1/chat/completions", GenerationEndpoint(service, CHAT), methods=["POST"])  # type: ignore[arg-type]
    app.exception_handler(ApiError)(_answer_api_error)
    app.exception_handler(HTTPException)(_answer_http_error)
    _add_control_endpoints(app, service, exposition)
    _add_token_endpoints(app, service)
    return app


def _add_control_endpoints(app: FastAPI, service: Service, exposition: Exposition) -> None:
    started_s = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": service.version, "engine": "kvtape sim"})

    @app.get("/v1/models")
    async def models() -> Response:
        card = {
            "id": service.model_name,
            "object": "model",
            "created": started_s,
            "owned_by": "kvtape",
            "root": service.model_name,
            "parent": None,
            "max_model_len": service.max_model_len,
        }
        return _json({"object": "list", "data": [card]})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        return _json({"success": service.engine.reset_prefix_cache()})


def _add_token_endpoints(app: FastAPI, service: Service) -> None:
    vocabulary = service.vocabulary

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = openai.decode_body(await request.body(), openai.TokenizeRequest)
        service.check_model(body.model)
        if body.messages is not None:
            answer = body.add_generation_prompt is not False
            messages = [message.joined() for message in body.messages]
            token_ids = vocabulary.render_chat(messages, body.tools or [], answer=answer)
        elif body.prompt is not None:
            token_ids = vocabulary.encode(body.prompt)
        else:
            raise ApiError("expected a prompt or messages")
        strings = [vocabulary.decode([token_id]) for token_id in token_ids] if body.return_token_strs else None
        counted = {"count": len(token_ids), "max_model_len": service.max_model_len}
        return _json(counted | {"tokens": token_ids, "token_strs": strings})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = openai.decode_body(await request.body(), openai.DetokenizeRequest)
        service.check_model(body.model)
        openai.check_ids(body.tokens, vocabulary.size, "tokens")
        return _json({"prompt": vocabulary.decode(body.tokens)})


async def _answer_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), status_code=error.status, media_type=JSON)


async def _answer_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    shaped = ApiError(str(error.detail), status=error.status_code, kind=kind)
    return Response(shaped.body(), status_code=error.status_code, media_type=JSON, headers=error.headers)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


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


def _send_whole(send: Send, status: int, body: bytes) -> Awaitable[None]:
    async def both() -> None:
        await send(_start(status, JSON, len(body)))
        await send({"type": "http.response.body", "body": body})

    return both()
