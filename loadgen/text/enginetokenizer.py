"""The engine's own tokenizer, asked over HTTP before a run; never during one, when every answer would cost it time.

vLLM takes a text (``prompt``) or a conversation (``messages``) at ``/tokenize``, and so does SGLang, whose older
versions take a text only; llama.cpp takes a text as ``content`` and makes a conversation one at ``/apply-template``.
``/detokenize`` answers with ``prompt``, ``text`` and ``content``, in this order.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engines.control import ControlClient
from loadgen.text.tokenizer import Message, TokenizerError
from tracefile import InputError

PROBE = "time"
"""A text that has tokens in every vocabulary."""


class EngineTokenizer:
    """Asks one engine. Raises TokenizerError if it cannot be asked at all."""

    name = "engine"

    def __init__(self, control: ControlClient, model: str) -> None:
        self._control, self._model = control, model
        self._takes_content = False
        try:
            asked = self.encode(PROBE)
        except TokenizerError:
            asked = []
        if not asked:
            # llama.cpp reads another field, and finds no tokens in a request without it.
            self._takes_content = True
            if not self.encode(PROBE):
                raise TokenizerError("the engine's /tokenize finds no tokens in a text")

    def encode(self, text: str) -> list[int]:
        """The ids of a text, nothing added around it."""
        return self._encode(text, special=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids."""
        told = self._ask("/detokenize", {"model": self._model, "tokens": list(token_ids)})
        texts = [told[name] for name in ("prompt", "text", "content") if isinstance(told.get(name), str)]
        if not texts:
            raise TokenizerError("the engine's /detokenize answers with no text")
        return str(texts[0])

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation as the engine sees it, up to where the assistant speaks."""
        if not self._takes_content:
            return _ids(self._ask("/tokenize", {"model": self._model, "messages": list(messages)}))
        rendered = self._ask("/apply-template", {"messages": list(messages)}).get("prompt")
        if not isinstance(rendered, str):
            raise TokenizerError("the engine's /apply-template answers with no prompt")
        return self._encode(rendered, special=True)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        """``special``: with what the model wants around a text, its template's own tokens apart."""
        if self._takes_content:
            return _ids(self._ask("/tokenize", {"content": text, "add_special": special, "parse_special": True}))
        return _ids(self._ask("/tokenize", {"model": self._model, "prompt": text, "add_special_tokens": special}))

    def _ask(self, path: str, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            response = self._control.post(path, msgspec.json.encode(question))
        except InputError as error:
            raise TokenizerError(f"the engine's {path} cannot be asked") from error
        if not response.is_success:
            raise TokenizerError(f"the engine's {path} gave HTTP {response.status_code}")
        try:
            return msgspec.json.decode(response.content, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise TokenizerError(f"the engine's {path} answers with no JSON object") from error


def _ids(told: Mapping[str, Any]) -> list[int]:
    try:
        return msgspec.convert(told.get("tokens"), list[int])
    except msgspec.ValidationError as error:
        raise TokenizerError("the engine's /tokenize answers with no token ids") from error
