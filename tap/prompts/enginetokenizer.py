"""The engine's own tokenizer, asked over HTTP from the recorder process: ``--tokenizer engine``.

vLLM takes a text or a conversation at ``/tokenize``, and so do recent versions of SGLang (older ones a text only);
llama.cpp takes a text there, and makes a conversation one at ``/apply-template``. Every question costs the engine a
tokenization that it has done once already: equal prompts are asked for once, one that failed is not asked for again,
and an engine that does not answer is left alone for a while. A prompt without an answer is counted as unhashed, by
what failed.
"""

import secrets
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, TypeVar

import httpx
import msgspec
import xxhash

from tap.ipc.exchange import Dialect
from tap.prompts.chatmessages import UntokenizableError
from tap.prompts.recentids import RecentIds
from tracefile.recency import RecentMap

TIMEOUT_S = 2.0
PAUSE_S = 10.0
"""How long an engine that cannot be asked is not asked."""
MAX_IDS = 2_000_000
MAX_FAILURES = 10_000
NO_SUCH_SERVICE = frozenset({401, 403, 404, 405, 501})
"""Answers that the next question would get as well."""


Answer = TypeVar("Answer")


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Prompt(msgspec.Struct):
    prompt: str


class EngineTokenizer:
    """Asks one engine at a time, one prompt at a time; what asks raises UntokenizableError."""

    def __init__(self, url: str, dialect: Dialect, *, timeout_s: float = TIMEOUT_S, pause_s: float = PAUSE_S) -> None:
        self._url = url
        self._clients: dict[str, httpx.Client] = {}
        self._dialect, self._timeout_s, self._pause_s = dialect, timeout_s, pause_s
        self._seed = secrets.randbits(64)
        self.recent = RecentIds(MAX_IDS)
        self._failures: RecentMap[bytes, str] = RecentMap(MAX_FAILURES)
        """Why, by the question's digest."""
        self._resume_at: dict[str, float] = {}
        """When an engine that could not be asked is asked again."""

    def turn_to(self, url: str) -> None:
        """Ask this engine from now on: the one that served a request is there and has its model."""
        self._url = url

    def encode_text(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """The ids of a text as it stands."""
        if self._dialect == "llamacpp":
            question = {"content": text, "add_special": add_special_tokens, "parse_special": True}
        else:
            question = {"prompt": text, "add_special_tokens": add_special_tokens}
        return self._ids(question)

    def encode_chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        """The ids of a chat request's prompt."""
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise UntokenizableError("no_messages")
        if body.get("chat_template") is not None:
            raise UntokenizableError("client_chat_template")
        question = chat_question(body)
        if self._dialect != "llamacpp":
            return self._ids(question)
        prompt = self._ask("/apply-template", msgspec.json.encode(question), _Prompt).prompt
        return self.encode_text(prompt, add_special_tokens=True)

    def close(self) -> None:
        """Close the connections to engines."""
        for client in self._clients.values():
            client.close()

    def _ids(self, question: Mapping[str, Any]) -> Sequence[int]:
        payload = msgspec.json.encode(question)
        digest = xxhash.xxh3_128_digest(payload, self._seed)
        known = self.recent.get(digest)
        return known if known is not None else self.recent.put(digest, self._ask("/tokenize", payload, _Tokens).tokens)

    def _ask(self, path: str, payload: bytes, kind: type[Answer]) -> Answer:
        digest = xxhash.xxh3_128_digest(path.encode() + payload, self._seed)
        failed = self._failures.get(digest)
        if failed is not None:
            raise UntokenizableError(failed)
        if monotonic() < self._resume_at.get(self._url, 0.0):
            raise UntokenizableError("engine_tokenizer_paused")
        try:
            response = self._client().post(path, content=payload, headers={"Content-Type": "application/json"})
        except httpx.TimeoutException:
            raise self._failure(digest, "timeout", pause=True) from None
        except httpx.HTTPError:
            raise self._failure(digest, "unreachable", pause=True) from None
        if response.status_code != 200:
            kind_of_failure = f"http_{response.status_code}"
            raise self._failure(digest, kind_of_failure, pause=response.status_code in NO_SUCH_SERVICE)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.DecodeError:
            raise self._failure(digest, "unreadable", pause=False) from None

    def _client(self) -> httpx.Client:
        client = self._clients.get(self._url)
        if client is None:
            client = httpx.Client(base_url=self._url, timeout=self._timeout_s, trust_env=False)
            self._clients[self._url] = client
        return client

    def _failure(self, digest: bytes, reason: str, *, pause: bool) -> UntokenizableError:
        """What to raise; the question is not asked again, and with ``pause`` none is for a while."""
        if pause:
            self._resume_at[self._url] = monotonic() + self._pause_s
        reason = f"engine_tokenizer_{reason}"
        self._failures[digest] = reason
        return UntokenizableError(reason)


def chat_question(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a chat that make its prompt; what only a completion request has goes in as template arguments."""
    own = body.get("chat_template_kwargs")
    arguments: dict[str, Any] = dict(own) if isinstance(own, dict) else {}
    effort = body.get("reasoning_effort")
    if effort is not None:
        arguments = {"reasoning_effort": effort, "enable_thinking": effort != "none", **arguments}
    if body.get("documents"):
        arguments["documents"] = body["documents"]
    continued = body.get("continue_final_message") is True
    question = {
        "model": body.get("model"),
        "messages": body["messages"],
        "tools": body.get("tools"),
        "add_generation_prompt": body.get("add_generation_prompt", not continued),
        "continue_final_message": continued or None,
        "add_special_tokens": body.get("add_special_tokens"),
        "chat_template_kwargs": arguments or None,
    }
    return {name: value for name, value in question.items() if value is not None}
