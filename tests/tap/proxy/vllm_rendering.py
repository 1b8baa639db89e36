"""Responses as vLLM 0.32 writes them, byte for byte: which members there are, in which order, asked for or not.

Written from its ``completion/serving.py`` and ``chat_completion/serving.py``; the test marked vllm holds a real one to
the same.
"""

import json
from dataclasses import dataclass, field
from typing import Any

MODEL = "tiny"
ABSENT: Any = object()


@dataclass(frozen=True)
class Step:
    """Output of a choice in one scheduler step."""

    index: int
    token_ids: list[int]
    delta: dict[str, Any] | None
    """A chat delta, or ``{"text": …}``. Null: the parser holds the tokens back."""
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """Output of a request, independent of its response format."""

    chat: bool
    prompt_token_ids: list[int]
    steps: list[Step]
    n: int = 1
    cached_tokens: int | None = None
    fingerprint: str | None = None
    continuous_usage: bool = False
    """``--enable-force-include-usage``: usage with every event and at the end, whatever was asked."""
    comments: list[str] = field(default_factory=list)
    """Keep-alives, after the first event."""

    @property
    def request_id(self) -> str:
        return "chatcmpl-1" if self.chat else "cmpl-1"

    def usage(self, completion_tokens: int) -> dict[str, Any]:
        prompt = len(self.prompt_token_ids)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion_tokens,
            "completion_tokens": completion_tokens,
        }

    def full_usage(self) -> dict[str, Any]:
        usage = self.usage(sum(len(step.token_ids) for step in self.steps))
        return usage | (
            {} if self.cached_tokens is None else {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}
        )


def compact(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def stream_events(answer: Answer, *, usage: bool, ids: bool) -> list[bytes]:
    """The stream's events, each with its empty line."""
    usage = usage or answer.continuous_usage
    chunks = [*_chat_chunks(answer, ids)] if answer.chat else [*_completion_chunks(answer, ids)]
    events = []
    for number, (chunk, tokens_so_far) in enumerate(chunks):
        if answer.continuous_usage:
            chunk["usage"] = answer.usage(tokens_so_far)
        if chunk["choices"][0]["finish_reason"] is not None and not usage and answer.fingerprint is not None:
            chunk["system_fingerprint"] = answer.fingerprint
        events.append(b"data: %b\n\n" % compact(chunk))
        if number == 0:
            events += [b": %b\n\n" % comment.encode() for comment in answer.comments]
    if usage:
        last = _envelope(answer) | {"choices": [], "usage": answer.full_usage()}
        if answer.fingerprint is not None:
            last["system_fingerprint"] = answer.fingerprint
        events.append(b"data: %b\n\n" % compact(last))
    return [*events, b"data: [DONE]\n\n"]


def full_body(answer: Answer, *, ids: bool) -> bytes:
    """Body of a response that is not streamed; absent members are null."""
    choices: list[dict[str, Any]] = []
    for index in range(answer.n):
        steps = [step for step in answer.steps if step.index == index]
        token_ids = [token for step in steps for token in step.token_ids] if ids else None
        common = {"logprobs": None, "finish_reason": steps[-1].finish_reason if steps else None, "stop_reason": None}
        if answer.chat:
            content = "".join((step.delta or {}).get("content") or "" for step in steps)
            calls = [call for step in steps for call in (step.delta or {}).get("tool_calls", ())]
            message = {"role": "assistant", "content": content, "refusal": None, "tool_calls": calls, "reasoning": None}
            choices.append({"index": index, "message": message, **common, "token_ids": token_ids})
        else:
            text = "".join((step.delta or {}).get("text", "") for step in steps)
            prompt = answer.prompt_token_ids if ids else None
            choices.append(
                {"index": index, "text": text, **common, "token_ids": token_ids, "prompt_logprobs": None}
                | {"prompt_token_ids": prompt, "routed_experts": None}
            )
    body = _envelope(answer, complete=True) | {"choices": choices, "service_tier": None}
    body |= {"system_fingerprint": answer.fingerprint, "usage": answer.full_usage(), "prompt_logprobs": None}
    if answer.chat:
        body["prompt_token_ids"] = answer.prompt_token_ids if ids else None
    return compact(body | {"kv_transfer_params": None})


def _envelope(answer: Answer, *, complete: bool = False) -> dict[str, Any]:
    kind = ("chat.completion" if complete else "chat.completion.chunk") if answer.chat else "text_completion"
    return {"id": answer.request_id, "object": kind, "created": 1758108431, "model": MODEL}


def _completion_chunks(answer: Answer, ids: bool) -> Any:
    started: set[int] = set()
    tokens = [0] * answer.n
    for step in answer.steps:
        tokens[step.index] += len(step.token_ids)
        prompt_ids = answer.prompt_token_ids if ids and step.index not in started else None
        started.add(step.index)
        choice = {
            "index": step.index,
            "text": (step.delta or {}).get("text", ""),
            "logprobs": step.logprobs,
            "finish_reason": step.finish_reason,
            "stop_reason": None,
            "prompt_token_ids": prompt_ids,
            "token_ids": step.token_ids if ids else None,
        }
        yield _envelope(answer) | {"choices": [choice]}, tokens[step.index]


def _chat_chunks(answer: Answer, ids: bool) -> Any:
    for index in range(answer.n):
        delta = {"role": "assistant", "content": ""}
        first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = _envelope(answer) | {"choices": [first]}
        prompt = answer.prompt_token_ids if ids else None
        yield chunk | {"prompt_token_ids": prompt, "prompt_text": None}, 0
    tokens = [0] * answer.n
    for step in answer.steps:
        tokens[step.index] += len(step.token_ids)
        if step.delta is None and step.finish_reason is None and step.logprobs is None and not ids:
            continue
        choice = {
            "index": step.index,
            "delta": step.delta or {},
            "logprobs": step.logprobs,
            "finish_reason": step.finish_reason,
            **({} if step.finish_reason is None else {"stop_reason": None}),
            "token_ids": step.token_ids if ids else None,
        }
        yield _envelope(answer) | {"choices": [choice]}, tokens[step.index]
