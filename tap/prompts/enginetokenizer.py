"""Tokenizer that calls the engine's ``/tokenize`` from the recorder process: ``--tokenizer engine``.

Token ids of equal prompts are cached. After a failure, the engine gets no ``/tokenize`` requests for a while. A prompt
without token ids counts as unhashed, by the kind of failure.
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
from engines.tokenization import APPLY_TEMPLATE, TOKENIZE, Rendered, TokenIds, chat_request, text_request
from tap.prompts.chatmessages import UntokenizableError
from tap.prompts.tokenizer import MAX_TEXT_CHARS, RecentIds

TIMEOUT_S = 2.0
PAUSE_S = 10.0
"""Pause of ``/tokenize`` requests to an engine after a failure."""
MAX_IDS = 2_000_000
HTTP_NOT_FOUND = 404
"""Status of a missing path, or of a model that the engine does not serve."""
PERMANENT_FAILURES = frozenset({401, 403, 405, 501})
"""Statuses that further requests would get as well."""


Reply = TypeVar("Reply")


class EngineTokenizer:
    """Returns token ids by ``/tokenize`` requests to one engine, one prompt at a time; raises UntokenizableError."""

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
        self._logged_refusals: set[str] = set()
        self._tokenized: set[str] = set()
        """Engines that have tokenized a prompt: a later 404 concerns one request only."""
        self._resume_at: dict[str, float] = {}
        """End of the pause of each failed engine."""

    def switch_engine(self, url: str) -> None:
        """Tokenize by this engine from now on: it served the request, so it is up and has the model."""
        self._url = url

    def encode_text(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        return self._token_ids(text_request(text, special=add_special_tokens, as_content=self._as_content))

    def encode_chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise UntokenizableError("no_messages")
        if body.get("chat_template") is not None:
            raise UntokenizableError("client_chat_template")
        fields = chat_request(body)
        if not self._as_content:
            return self._token_ids(fields)
        prompt = self._post(APPLY_TEMPLATE, msgspec.json.encode(fields), Rendered).prompt
        return self.encode_text(prompt, add_special_tokens=True)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _token_ids(self, fields: Mapping[str, Any]) -> Sequence[int]:
        payload = msgspec.json.encode(fields)
        digest = xxhash.xxh3_128_digest(payload, self._seed)
        ids = self.recent.get(digest)
        return ids if ids is not None else self.recent.put(digest, self._post(TOKENIZE, payload, TokenIds).tokens)

    def _post(self, path: str, payload: bytes, kind: type[Reply]) -> Reply:
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
            self._log_refusal(path, response.refusal)
            status = response.status
            pause = status in PERMANENT_FAILURES or (status == HTTP_NOT_FOUND and self._url not in self._tokenized)
            raise self._failure(f"http_{status}", pause=pause)
        self._tokenized.add(self._url)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise self._failure("unreadable", pause=False) from None

    def _calls(self) -> BlockingCalls:
        calls = self._clients.get(self._url)
        if calls is None:
            calls = self._clients[self._url] = BlockingCalls(self._url, self._timeout_s, self._access)
        return calls

    def _log_refusal(self, path: str, refusal: str) -> None:
        """Print a refusal for a missing key, once; the account has only its HTTP status."""
        if refusal and refusal not in self._logged_refusals:
            self._logged_refusals.add(refusal)
            print(f"tap: upstream {self._url}{path}: {refusal}; RECORDS HAVE NO HASHES UNTIL THEN", file=sys.stderr)

    def _failure(self, reason: str, *, pause: bool) -> UntokenizableError:
        """Return the error to raise; ``pause``: send the engine no ``/tokenize`` requests for a while."""
        if pause:
            self._resume_at[self._url] = monotonic() + self._pause_s
        return UntokenizableError(f"engine_tokenizer_{reason}")
