"""The engine's own tokenizer over HTTP, from the recorder process: ``--tokenizer engine``.

Equal prompts are asked once, and an engine that does not answer, or has no such path, is left alone for a while. A
prompt without ids counts as unhashed, by the kind of failure.
"""

import secrets
import sys
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, TypeVar

import msgspec
import xxhash

from engines.access import OPEN, Access
from engines.calls import BlockingCalls, CallError, LateError
from engines.detection import DIALECTS
from engines.dialect import DialectName
from engines.tokenization import APPLY_TEMPLATE, TOKENIZE, Rendered, TokenIds, chat_question, text_question
from tap.prompts.chatmessages import UntokenizableError
from tap.prompts.tokenizer import MAX_TEXT_CHARS, RecentIds

TIMEOUT_S = 2.0
PAUSE_S = 10.0
"""Time for which an engine that cannot be asked is left alone."""
MAX_IDS = 2_000_000
NOT_FOUND = 404
"""Status of a missing path, and of a model that the engine does not serve."""
NO_SUCH_SERVICE = frozenset({401, 403, 405, 501})
"""Statuses that further questions would get as well."""


Answer = TypeVar("Answer")


class EngineTokenizer:
    """Asks one engine at a time, one prompt at a time; raises UntokenizableError."""

    def __init__(
        self,
        url: str,
        dialect: DialectName,
        access: Access = OPEN,
        *,
        timeout_s: float = TIMEOUT_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._url, self._access = url, access
        self._clients: dict[str, BlockingCalls] = {}
        self._as_content = DIALECTS[dialect].tokenizes_content
        self._timeout_s, self._pause_s = timeout_s, pause_s
        self._seed = secrets.randbits(64)
        self.recent = RecentIds(MAX_IDS)
        self._refusals: set[str] = set()
        self._tokenizing: set[str] = set()
        """Engines that have tokenized before: their 404 is about one question."""
        self._resume_at: dict[str, float] = {}
        """Time at which an unreachable engine is asked again."""

    def turn_to(self, url: str) -> None:
        """Ask this engine from now on: it served a request, so it is up and has its model."""
        self._url = url

    def encode_text(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        return self._ids(text_question(text, special=add_special_tokens, as_content=self._as_content))

    def encode_chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise UntokenizableError("no_messages")
        if body.get("chat_template") is not None:
            raise UntokenizableError("client_chat_template")
        question = chat_question(body)
        if not self._as_content:
            return self._ids(question)
        prompt = self._ask(APPLY_TEMPLATE, msgspec.json.encode(question), Rendered).prompt
        return self.encode_text(prompt, add_special_tokens=True)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _ids(self, question: Mapping[str, Any]) -> Sequence[int]:
        payload = msgspec.json.encode(question)
        digest = xxhash.xxh3_128_digest(payload, self._seed)
        known = self.recent.get(digest)
        return known if known is not None else self.recent.put(digest, self._ask(TOKENIZE, payload, TokenIds).tokens)

    def _ask(self, path: str, payload: bytes, kind: type[Answer]) -> Answer:
        if len(payload) > MAX_TEXT_CHARS:
            raise UntokenizableError("prompt_too_long")
        if monotonic() < self._resume_at.get(self._url, 0.0):
            raise UntokenizableError("engine_tokenizer_paused")
        try:
            response = self._calls().post(path, payload)
        except LateError:
            raise self._failure("timeout", pause=True) from None
        except CallError:
            raise self._failure("unreachable", pause=True) from None
        if response.status != 200:
            self._say_refusal(path, response.refusal)
            status = response.status
            pause = status in NO_SUCH_SERVICE or (status == NOT_FOUND and self._url not in self._tokenizing)
            raise self._failure(f"http_{status}", pause=pause)
        self._tokenizing.add(self._url)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise self._failure("unreadable", pause=False) from None

    def _calls(self) -> BlockingCalls:
        calls = self._clients.get(self._url)
        if calls is None:
            calls = self._clients[self._url] = BlockingCalls(self._url, self._timeout_s, self._access)
        return calls

    def _say_refusal(self, path: str, refusal: str) -> None:
        """Print a refusal for want of a key, once; the account has its status only."""
        if refusal and refusal not in self._refusals:
            self._refusals.add(refusal)
            print(f"tap: upstream {self._url}{path}: {refusal}; UNTIL THEN RECORDS HAVE NO HASHES", file=sys.stderr)

    def _failure(self, reason: str, *, pause: bool) -> UntokenizableError:
        """Return the error to raise; with ``pause`` the engine is asked nothing for a while."""
        if pause:
            self._resume_at[self._url] = monotonic() + self._pause_s
        return UntokenizableError(f"engine_tokenizer_{reason}")
