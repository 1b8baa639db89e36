"""``/v1/completions`` and ``/v1/chat/completions`` as in vLLM 0.32, but cached tokens are those of all prompts."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from sim.serving.apis.encoder import Api, Delta, ResponseEncoder, Usage
from sim.serving.engine.service import Service
from sim.serving.requests.errors import ApiError
from sim.serving.requests.fields import (
    MAX_TOP_LOGPROBS,
    Asked,
    ChatMessage,
    GenerationFields,
    check_top_logprobs,
    decode_body,
    decode_prompts,
)
from sim.serving.requests.vocabulary import Vocabulary

DEFAULT_TOKENS = 16
DONE = b"data: [DONE]\n\n"
MESSAGE: Mapping[str, Any] = {"role": "assistant", "content": None, "refusal": None, "reasoning": None}


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """The body; the prompt is a text, ids, or a list of either."""

    prompt: msgspec.Raw
    logprobs: int | None = None
    echo: bool | None = False
    prompt_logprobs: int | None = None


class Completions(Api):
    """The API."""

    id_prefix = "cmpl-"

    def read(self, service: Service, body: bytes) -> Asked:
        request = decode_body(body, CompletionRequest)
        service.check_model(request.model)
        prompts = decode_prompts(request.prompt, service.vocabulary)
        max_tokens = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
        top = check_top_logprobs(request.logprobs)
        scored = top if request.prompt_logprobs is None and request.echo else request.prompt_logprobs
        if request.stream and (request.echo or request.prompt_logprobs):
            name = "echo" if request.echo else "prompt_logprobs"
            raise ApiError(f"`{name}` is not available when `stream=True`.", param=name)
        return Asked(
            fields=request,
            prompts=prompts,
            max_tokens=max_tokens,
            top_logprobs=top,
            prompt_logprobs=check_top_logprobs(scored, "prompt_logprobs"),
            echo=bool(request.echo),
        )

    def encoder(self, service: Service, asked: Asked, response_id: str, created_s: int) -> ResponseEncoder:
        return CompletionEncoder(service, asked, response_id, created_s)


class ChunkEncoder(ResponseEncoder):
    """Encodes one response, whose events are chunks that begin alike."""

    chunk: str
    """The events' kind of object."""

    def __init__(self, service: Service, asked: Asked, response_id: str, created_s: int) -> None:
        self._vocabulary, self._spelling = service.vocabulary, service.spelling
        self._asked = asked
        self._fields = {"id": response_id, "object": self.chunk, "created": created_s, "model": service.model_name}
        self._head = b"data: " + msgspec.json.encode(self._fields)[:-1] + b","
        self._with_ids = bool(asked.fields.return_token_ids)

    def closing(self, usage: Usage) -> bytes:
        options = self._asked.fields.stream_options
        told = options is not None and bool(options.include_usage)
        return (self._event({"choices": []}, usage) if told else b"") + DONE

    def _event(self, fields: dict[str, Any], usage: Usage | None) -> bytes:
        """A chunk: one server-sent event."""
        if usage is not None:
            fields["usage"] = usage.fields()
        return self._head + msgspec.json.encode(fields)[1:] + b"\n\n"

    def _encoded(self, before: bytes, after: bytes, token_ids: Sequence[int]) -> list[bytes]:
        """An event for each token: its text stands behind ``before``, and its id behind ``after`` if that is told."""
        if self._with_ids:
            return [b"%b%b%b[%d]}]}\n\n" % (before, self._spelling[one], after, one) for one in token_ids]
        after += b"null}]}\n\n"
        return [before + self._spelling[one] + after for one in token_ids]


class CompletionEncoder(ChunkEncoder):
    """Encodes one completion."""

    chunk = "text_completion"

    def __init__(self, service: Service, asked: Asked, response_id: str, created_s: int) -> None:
        super().__init__(service, asked, response_id, created_s)
        self._choices = asked.fields.n or 1
        self._offsets: dict[int, int] = {}
        """Characters said so far of each choice, where logprobs ask for it."""

    def tokens(self, place: int, token_ids: Sequence[int]) -> list[bytes]:
        if self._asked.top_logprobs is not None or self._asked.fields.stops():
            return []
        before = b'%b"choices":[{"index":%d,"text":' % (self._head, place)
        after = b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":'
        return self._encoded(before, after, token_ids)

    def delta(self, delta: Delta, usage: Usage | None) -> bytes:
        choice = self._choice(delta)
        del choice["prompt_logprobs"]
        return self._event({"choices": [choice]}, usage)

    def whole(self, deltas: list[Delta], usage: Usage) -> bytes:
        choices = [self._choice(delta) for delta in deltas]
        return msgspec.json.encode(self._fields | {"choices": choices, "usage": usage.fields()})

    def _choice(self, delta: Delta) -> dict[str, Any]:
        place = delta.generation.place
        prompt = self._asked.prompts[place // self._choices]
        # As from vLLM, the prompt's text does not stand beside its ids.
        echoed = self._vocabulary.decode(prompt) if self._asked.echo and not self._with_ids else ""
        text = echoed + delta.text(self._vocabulary)
        logprobs = None
        if self._asked.top_logprobs is not None:
            offset = self._offsets.get(place, len(self._vocabulary.decode(prompt)) if self._asked.echo else 0)
            self._offsets[place] = offset + len(text)
            logprobs = completion_logprobs(
                self._vocabulary, delta.token_ids, delta.start, offset, self._asked.top_logprobs
            )
            if self._asked.echo:
                before = prompt_logprobs(self._vocabulary, prompt, self._asked.top_logprobs)
                logprobs = {name: before[name] + values for name, values in logprobs.items()}
        first, scored = self._with_ids and delta.start == 0, self._asked.prompt_logprobs
        scored = None if self._asked.fields.stream else scored
        return {
            "index": place,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.generation.output.stop_reason if delta.finish_reason else None,
            "token_ids": delta.token_ids if self._with_ids else None,
            "prompt_logprobs": None if scored is None else named_logprobs(self._vocabulary, prompt, scored),
            "prompt_token_ids": prompt if first else None,
        }


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """The body."""

    messages: list[ChatMessage]
    tools: list[Any] | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = True
    logprobs: bool | None = False
    top_logprobs: int | None = None


class Chats(Api):
    """The API."""

    id_prefix = "chatcmpl-"

    def read(self, service: Service, body: bytes) -> Asked:
        request = decode_body(body, ChatRequest)
        service.check_model(request.model)
        if not request.messages:
            raise ApiError("messages: must not be empty", param="messages")
        messages = [message.joined() for message in request.messages]
        generation_prompt = request.add_generation_prompt is not False
        prompt = service.vocabulary.render_chat(messages, request.tools or [], generation_prompt=generation_prompt)
        max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        top = check_top_logprobs(request.top_logprobs or 0) if request.logprobs else None
        return Asked(fields=request, prompts=[prompt], max_tokens=max_tokens, top_logprobs=top)

    def encoder(self, service: Service, asked: Asked, response_id: str, created_s: int) -> ResponseEncoder:
        return ChatEncoder(service, asked, response_id, created_s)


class ChatEncoder(ChunkEncoder):
    """Encodes one chat's response."""

    chunk = "chat.completion.chunk"

    def tokens(self, place: int, token_ids: Sequence[int]) -> list[bytes]:
        if self._asked.top_logprobs is not None or self._asked.fields.stops():
            return []
        before = b'%b"choices":[{"index":%d,"delta":{"content":' % (self._head, place)
        after = b'},"logprobs":null,"finish_reason":null,"token_ids":'
        return self._encoded(before, after, token_ids)

    def delta(self, delta: Delta, usage: Usage | None) -> bytes:
        """A chunk; before a choice's first one, another with its role."""
        generation = delta.generation
        role = b"" if delta.start else self._role(generation.place, usage)
        choice = self._choice(delta, "delta", {})
        if delta.finish_reason is None:
            del choice["stop_reason"]
        return role + self._event({"choices": [choice]}, usage)

    def whole(self, deltas: list[Delta], usage: Usage) -> bytes:
        fields = {
            **self._fields,
            "object": "chat.completion",
            "choices": [self._choice(delta, "message", MESSAGE) for delta in deltas],
            "usage": usage.fields(),
            "prompt_token_ids": self._asked.prompts[0] if self._with_ids else None,
        }
        return msgspec.json.encode(fields)

    def _role(self, place: int, usage: Usage | None) -> bytes:
        choice = {"index": place, "delta": {"role": "assistant", "content": ""}}
        choice |= {"logprobs": None, "finish_reason": None}
        prompt_ids = self._asked.prompts[0] if self._with_ids and place == 0 else None
        told = None if usage is None else usage._replace(completion_tokens=usage.completion_tokens - 1)
        return self._event({"choices": [choice], "prompt_token_ids": prompt_ids}, told)

    def _choice(self, delta: Delta, key: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._asked.top_logprobs is not None:
            logprobs = chat_logprobs(self._vocabulary, delta.token_ids, delta.start, self._asked.top_logprobs)
        return {
            "index": delta.generation.place,
            key: {**fields, "content": delta.text(self._vocabulary)},
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.generation.output.stop_reason if delta.finish_reason else None,
            "token_ids": delta.token_ids if self._with_ids else None,
        }


_STEP = 0.75
"""Step of log probability between alternatives. There is no model: values are made up from token and place."""


def completion_logprobs(
    vocabulary: Vocabulary, token_ids: list[int], place: int, offset: int, count: int
) -> dict[str, Any]:
    """``logprobs`` of a completion's tokens, from the output's number ``place``, ``offset`` characters in."""
    texts = [vocabulary.decode([token_id]) for token_id in token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    chosen = [_logprob(token_id, place + number) for number, token_id in enumerate(token_ids)]
    tops = []
    for token_id, logprob in zip(token_ids, chosen, strict=True):
        ranked = enumerate(_top(vocabulary, token_id, count))
        tops.append({vocabulary.decode([other]): logprob - _STEP * rank for rank, other in ranked})
    return {"text_offset": offsets, "token_logprobs": chosen, "tokens": texts, "top_logprobs": tops}


def prompt_tops(vocabulary: Vocabulary, prompt: list[int], count: int) -> list[dict[int, float] | None]:
    """Log probabilities of each prompt token and its alternatives by id; every other token is not the likeliest."""
    tops: list[dict[int, float] | None] = [None]
    for place, token_id in enumerate(prompt[1:], start=1):
        best, others = _logprob(token_id, place), _top(vocabulary, token_id, count + 1)[1:]
        if (token_id ^ place) & 1:
            top = {other: best - _STEP * rank for rank, other in enumerate(others)}
            tops.append(top | {token_id: best - _STEP * MAX_TOP_LOGPROBS})
        else:
            tops.append({token_id: best} | {other: best - _STEP * rank for rank, other in enumerate(others[:-1], 1)})
    return tops


def prompt_logprobs(vocabulary: Vocabulary, prompt: list[int], count: int) -> dict[str, list[Any]]:
    """``logprobs`` of an echoed prompt."""
    texts, tops = [vocabulary.decode([token_id]) for token_id in prompt], prompt_tops(vocabulary, prompt, count)
    named = [None if top is None else {vocabulary.decode([one]): value for one, value in top.items()} for top in tops]
    chosen = [None if top is None else top[token_id] for token_id, top in zip(prompt, tops, strict=True)]
    offsets = [0, *accumulate(map(len, texts[:-1]))]
    return {"text_offset": offsets, "token_logprobs": chosen, "tokens": texts, "top_logprobs": named}


def named_logprobs(vocabulary: Vocabulary, prompt: list[int], count: int) -> list[dict[int, Any] | None]:
    """``prompt_logprobs``: by token id, each with its rank and text."""

    def entries(top: dict[int, float]) -> dict[int, Any]:
        return {
            one: {"logprob": value, "rank": rank, "decoded_token": vocabulary.decode([one])}
            for rank, (one, value) in enumerate(top.items(), start=1)
        }

    return [None if top is None else entries(top) for top in prompt_tops(vocabulary, prompt, count)]


def chat_logprobs(vocabulary: Vocabulary, token_ids: list[int], place: int, count: int) -> dict[str, Any]:
    """``logprobs`` of a chat's tokens; the Responses API has the same in its own place."""
    content = []
    for number, token_id in enumerate(token_ids):
        logprob = _logprob(token_id, place + number)
        tops = [
            _entry(vocabulary, other, logprob - _STEP * rank)
            for rank, other in enumerate(_top(vocabulary, token_id, count))
        ]
        content.append(_entry(vocabulary, token_id, logprob) | {"top_logprobs": tops})
    return {"content": content}


def _entry(vocabulary: Vocabulary, token_id: int, logprob: float) -> dict[str, Any]:
    text = vocabulary.decode([token_id])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _logprob(token_id: int, place: int) -> float:
    return -((token_id * 2_654_435_761 + place * 40_503) % 4096) / 1024


def _top(vocabulary: Vocabulary, token_id: int, count: int) -> list[int]:
    """The chosen token and ``count`` − 1 others."""
    others = vocabulary.output_ids
    picked = (int(others[(token_id + 7919 * rank) % len(others)]) for rank in range(1, count))
    return [token_id, *picked][:count]
