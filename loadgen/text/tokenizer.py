"""The target's tokenizer, local or the engine's over HTTP; used before a run, where latency does not matter."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from engines.control import ControlClient
from engines.dialect import Control
from engines.tokenization import (
    APPLY_TEMPLATE,
    DETOKENIZE,
    TOKENIZE,
    DetokenizedText,
    Rendered,
    TokenIds,
    chat_request,
    text_request,
    tokenizer_problem,
)
from engines.tokenizer import load_tokenizer, tokenizer_folder
from loadgen.text.api_messages import Message
from tracefile.records.decoding import NOT_JSON
from tracefile.records.errors import InputError

Response = TypeVar("Response")
EXPECTED = {TOKENIZE: "no token ids", APPLY_TEMPLATE: "no prompt", DETOKENIZE: "no text"}
AUTO, ENGINE, NONE = "auto", "engine", "none"


class TokenizerError(Exception):
    """The tokenizer cannot do this; the message is a short reason for the summary."""


class Tokenizer(Protocol):
    """Tokenizer of a target. Methods raise TokenizerError if there is no result."""

    name: str

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, up to the start of the assistant's output."""


class LocalTokenizer:
    """The model's files: a transformers tokenizer and its chat template. Raises InputError if there is none."""

    def __init__(self, path: Path) -> None:
        self.name = path.name or str(path)
        self._model = load_tokenizer(tokenizer_folder(path, alternatives=" or `engine`"))

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._model.encode(text, add_special_tokens=False)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        size = len(self._model)  # slow: transformers counts its tables
        in_vocabulary = [token_id for token_id in token_ids if token_id < size]
        text: str = self._model.decode(in_vocabulary, clean_up_tokenization_spaces=False)
        return text

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if not self._model.chat_template:
            raise TokenizerError("its tokenizer has no chat template")
        try:
            text: str = self._model.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template may raise any error, such as for a refused role
            raise TokenizerError(f"its chat template refuses these messages ({type(error).__name__})") from error
        return self.encode(text)


class EngineTokenizer:
    """Tokenizer of a running engine, over HTTP. Raises TokenizerError if it has none."""

    name = "engine"

    def __init__(self, control: Control, model: str) -> None:
        self._control, self._model = control, model
        # llama.cpp reads another field, and returns no tokens without it.
        self._reads_content = tokenizer_problem(control, model, as_content=False) is not None
        problem = tokenizer_problem(control, model, as_content=True) if self._reads_content else None
        if problem is not None:
            raise TokenizerError(f"the engine's {problem}")

    def encode(self, text: str) -> list[int]:
        return self._encode(text, special=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self._ask(DETOKENIZE, {"model": self._model, "tokens": list(token_ids)}, DetokenizedText).content_text
        if text is None:
            raise TokenizerError("the engine's /detokenize returns no text")
        return text

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        question = chat_request({"model": self._model, "messages": list(messages)})
        if not self._reads_content:
            return self._ask(TOKENIZE, question, TokenIds).tokens
        return self._encode(self._ask(APPLY_TEMPLATE, question, Rendered).prompt, special=True)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        question = text_request(text, special=special, as_content=self._reads_content)
        return self._ask(TOKENIZE, {"model": self._model, **question}, TokenIds).tokens

    def _ask(self, path: str, question: Mapping[str, Any], kind: type[Response]) -> Response:
        try:
            response = self._control.post(path, msgspec.json.encode(question))
        except InputError as error:
            raise TokenizerError(f"the engine's {path} is unreachable") from error
        if not response.is_success:
            raise TokenizerError(f"the engine's {path} returns {response.status_text}")
        try:
            return msgspec.json.decode(response.content, type=kind)
        except NOT_JSON as error:
            raise TokenizerError(f"the engine's {path} returns {EXPECTED[path]}") from error


def find_tokenizer(source: str, control: ControlClient, model: str) -> LocalTokenizer | EngineTokenizer:
    """Tokenizer of ``--tokenizer``. Raises TokenizerError if there is none and none was required."""
    if source == NONE:
        raise TokenizerError("--tokenizer none")
    if source not in (AUTO, ENGINE):
        return LocalTokenizer(Path(source))
    try:
        return EngineTokenizer(control, model)
    except TokenizerError as error:
        if source == AUTO:
            raise
        raise InputError(f"--tokenizer: engine: {error}; expected a path to the model's tokenizer") from None


def path_of(source: str) -> Path | None:
    return None if source in (AUTO, ENGINE, NONE) else Path(source)
