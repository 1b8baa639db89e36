"""Engines as their sources have them: each takes its own fields and refuses every other, over a real socket.

A prompt's blocks are in the prefix cache once it has arrived, the blocks of its output once that has ended.
"""

import contextlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tests.fakes.prefix_cache import PrefixCache
from tests.fakes.threads import QuietHandler, serving

Json = dict[str, Any]
JsonType = type | tuple[type, ...]

OPENAI_FIELDS: Mapping[str, JsonType] = {
    "model": str,
    "prompt": list,
    "max_tokens": int,
    "n": int,
    "stream": bool,
    "stream_options": dict,
    "temperature": (int, float),
}


class Refused(Exception):  # noqa: N818 - an answer, not an error of ours
    """HTTP 400, and why."""


class NotSupported(Exception):  # noqa: N818 - an answer too
    """HTTP 501."""


class StrictEngine:
    """What all have in common; the plain OpenAI API."""

    owner: ClassVar[str] = "someone"
    path: ClassVar[str] = "/v1/completions"
    fields: ClassVar[Mapping[str, JsonType]] = OPENAI_FIELDS
    block_size: ClassVar[int] = 16

    def __init__(self) -> None:
        self.random = random.Random(self.owner)
        self.cache = PrefixCache(self.block_size)
        self.seen: list[Json] = []
        self.refusals: list[str] = []
        self.calls: list[str] = []
        self.url = ""

    # What they answer

    def complete(self, body: Json) -> Iterator[bytes]:
        """The response body, event by event, or as a whole."""
        self.check(body)
        self.seen.append(body)
        prompt = body["prompt"]
        cached = self.cache.look_up(prompt)
        self.cache.fill(prompt)
        answers = [self.generate(self.length(body)) for _ in range(self.choices(body))]
        events = self.render(body, answers, cached)
        self.cache.fill([*prompt, *answers[0][:-1]])
        yield from events

    def length(self, body: Json) -> int:
        """An answer ends when the model likes: one token early."""
        return max(1, int(body["max_tokens"]) - 1)

    def choices(self, body: Json) -> int:
        return int(body.get("n", 1))

    def render(self, body: Json, answers: Sequence[list[int]], cached: int) -> Iterator[bytes]:
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": sum(map(len, answers)),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if not body.get("stream"):
            choices = [self.choice(index, ids, "length") for index, ids in enumerate(answers)]
            yield json.dumps({"object": "text_completion", "choices": choices, "usage": usage}).encode()
            return
        for index, ids in enumerate(answers):
            for position, token in enumerate(ids):
                end = "length" if position == len(ids) - 1 else None
                yield event({"choices": [self.choice(index, [token], end)]})
        if body.get("stream_options", {}).get("include_usage"):
            yield event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def choice(self, index: int, ids: list[int], finish_reason: str | None) -> Json:
        return {"index": index, "text": "".join(f"t{token} " for token in ids), "finish_reason": finish_reason}

    def get(self, path: str) -> Json | list[Json] | None:
        """What a GET answers; null: 404."""
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "strict", "owned_by": self.owner}]}
        return None

    def post(self, path: str) -> Json | None:
        """What a POST without a body answers; null: 404."""
        return None

    # How they refuse

    def check(self, body: Json) -> None:
        for name, value in body.items():
            if name not in self.fields:
                raise Refused(f"{name}: extra inputs are not permitted")
            if not isinstance(value, self.fields[name]) or (isinstance(value, bool) and self.fields[name] is not bool):
                raise Refused(f"{name}: {value!r}")
        if "stream_options" in body and not body.get("stream"):
            raise Refused("stream options can only be defined when stream is true")
        if not all(type(token) is int and 0 <= token < 150_000 for token in body["prompt"]):
            raise Refused("prompt: token ids out of range")

    def generate(self, count: int) -> list[int]:
        return [self.random.randrange(150_000) for _ in range(count)]

    @contextlib.contextmanager
    def serving(self) -> Iterator["StrictEngine"]:
        """Serve from threads for the length of the block."""
        with serving(handler_of(self)) as self.url:
            yield self


class Vllm(StrictEngine):
    """vLLM, its development endpoints on."""

    owner = "vllm"
    fields: ClassVar[Mapping[str, JsonType]] = {
        **OPENAI_FIELDS,
        **{"min_tokens": int, "ignore_eos": bool, "return_token_ids": bool, "priority": int},
    }
    busy = False

    def length(self, body: Json) -> int:
        return int(body["max_tokens"]) if body["min_tokens"] == body["max_tokens"] and body["ignore_eos"] else 1

    def choice(self, index: int, ids: list[int], finish_reason: str | None) -> Json:
        return super().choice(index, ids, finish_reason) | {"token_ids": ids}

    def post(self, path: str) -> Json | None:
        if path != "/reset_prefix_cache":
            return None
        if not self.busy:
            self.cache.clear()
        return {"success": not self.busy}


class Sglang(Vllm):
    """SGLang."""

    owner = "sglang"

    def post(self, path: str) -> Json | None:
        if path != "/flush_cache":
            return None
        self.cache.clear()
        return {}


class LlamaCpp(StrictEngine):
    """llama.cpp's own endpoint: every token may be a hit, ids come without asking in streams, no ``[DONE]``."""

    owner = "llamacpp"
    path = "/completion"
    block_size = 1
    remembers = False
    """Prompts that others displaced are kept in memory; an erased slot's are not."""
    saves = True
    """It was started with --slot-save-path."""
    fields: ClassVar[Mapping[str, JsonType]] = {
        "model": str,
        "prompt": list,
        "n_predict": int,
        "n_cmpl": int,
        "ignore_eos": bool,
        "return_tokens": bool,
        "cache_prompt": bool,
        "stream": bool,
        "temperature": (int, float),
        "lora": list,
        "id_slot": int,
    }

    def __init__(self) -> None:
        super().__init__()
        self.displaced: set[tuple[int, ...]] = set()

    def complete(self, body: Json) -> Iterator[bytes]:
        if self.remembers and "id_slot" in body:
            self.displaced |= self.cache.prefixes
        return super().complete(body)

    def length(self, body: Json) -> int:
        return int(body["n_predict"]) if body.get("ignore_eos") else 1

    def choices(self, body: Json) -> int:
        return int(body.get("n_cmpl", 1))

    def render(self, body: Json, answers: Sequence[list[int]], cached: int) -> Iterator[bytes]:
        computed = len(body["prompt"]) - cached
        ends = [
            {
                "index": index,
                "content": "",
                "tokens": [],
                "stop": True,
                "stop_type": "limit",
                "tokens_predicted": len(ids),
                "tokens_evaluated": len(body["prompt"]),
                "timings": {"cache_n": cached, "prompt_n": computed, "predicted_n": len(ids)},
            }
            for index, ids in enumerate(answers)
        ]
        if not body.get("stream"):
            total = [end | {"content": "x", "tokens": ids} for end, ids in zip(ends, answers, strict=True)]
            yield json.dumps(total[0] if len(total) == 1 else total).encode()
            return
        for index, ids in enumerate(answers):
            for token in ids:
                yield event({"index": index, "content": f"t{token}", "tokens": [token], "stop": False})
            yield event(ends[index])

    def get(self, path: str) -> Json | list[Json] | None:
        if path == "/slots":
            return [{"id": 0}, {"id": 1}]
        return super().get(path)

    def post(self, path: str) -> Json | None:
        if path.startswith("/slots/") and not self.saves:
            raise NotSupported
        if path not in {"/slots/0?action=erase", "/slots/1?action=erase"}:
            return None
        if path.startswith("/slots/1"):
            self.cache.prefixes = set(self.displaced)
        return {"id_slot": 0, "n_erased": 1}


class TensorRtLlm(StrictEngine):
    """TensorRT-LLM: ids in place of text, no reset."""

    owner = "tensorrt_llm"
    fields: ClassVar[Mapping[str, JsonType]] = {
        **OPENAI_FIELDS,
        **{"min_tokens": int, "ignore_eos": bool, "detokenize": bool, "lora_request": dict},
    }

    def length(self, body: Json) -> int:
        return int(body["max_tokens"]) if body["min_tokens"] == body["max_tokens"] and body["ignore_eos"] else 1

    def render(self, body: Json, answers: Sequence[list[int]], cached: int) -> Iterator[bytes]:
        assert body["detokenize"] is False
        return super().render(body, answers, cached)

    def choice(self, index: int, ids: list[int], finish_reason: str | None) -> Json:
        return {"index": index, "text": "", "token_ids": ids, "finish_reason": finish_reason}


class OpenAi(StrictEngine):
    """Somebody's OpenAI-compatible API."""


ENGINES: Mapping[str, type[StrictEngine]] = {
    "vllm": Vllm,
    "sglang": Sglang,
    "llamacpp": LlamaCpp,
    "trtllm": TensorRtLlm,
    "openai": OpenAi,
}


def event(data: Json) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def handler_of(engine: StrictEngine) -> type[QuietHandler]:
    """A request handler for one engine."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(engine.get(self.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            if self.path == engine.path:
                self.complete(json.loads(body))
                return
            engine.calls.append(f"POST {self.path}")
            try:
                self.answer(engine.post(self.path))
            except NotSupported:
                self.reply(501, b'{"error": {"message": "not supported"}}', "application/json")

        def complete(self, body: Json) -> None:
            try:
                total = b"".join(engine.complete(body))
            except Refused as why:
                engine.refusals.append(str(why))
                self.reply(400, b'{"error": {"message": "refused"}}', "application/json")
                return
            self.reply(200, total, "text/event-stream" if body.get("stream") else "application/json")

        def answer(self, result: Json | list[Json] | None) -> None:
            self.reply(404 if result is None else 200, json.dumps(result or {}).encode(), "application/json")

    return Handler
