"""The target's tokenizer, asked before a run: what a text, a conversation or a row of ids is to it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from engines.tokenizer import load_tokenizer, tokenizer_folder

Message = dict[str, Any]


class TokenizerError(Exception):
    """The tokenizer does not do this; the message says why in a few words, for a summary."""


class Tokenizer(Protocol):
    """Tokenizer of a target. Methods raise TokenizerError where it, or the engine, has no result."""

    name: str

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation, up to the start of the assistant's output."""


class LocalTokenizer:
    """The model's own files: a transformers tokenizer and its chat template. Raises InputError if there is none."""

    def __init__(self, path: Path) -> None:
        self.name = path.name or str(path)
        self._model = load_tokenizer(tokenizer_folder(path, others=" or `engine`"))

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._model.encode(text, add_special_tokens=False)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        size = len(self._model)  # transformers counts its tables each time
        known = [token_id for token_id in token_ids if token_id < size]
        text: str = self._model.decode(known, clean_up_tokenization_spaces=False)
        return text

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode(self.render_chat(messages, generation_prompt=True))

    def render_chat(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """Return a conversation's text, up to the start of the assistant's output or within its last message."""
        if not self._model.chat_template:
            raise TokenizerError("its tokenizer has no chat template")
        try:
            text: str = self._model.apply_chat_template(
                [_with_parsed_calls(message) for message in messages],
                add_generation_prompt=generation_prompt,
                continue_final_message=not generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # a template may raise anything: a refused role is its own kind of error
            raise TokenizerError(f"its chat template refuses such messages ({type(error).__name__})") from error
        return text


def _with_parsed_calls(message: Message) -> Message:
    """Parse a call's arguments, which templates expect as a mapping and the API carries as a string."""
    calls = message.get("tool_calls")
    return message if not calls else {**message, "tool_calls": [_parsed(call) for call in calls]}


def _parsed(call: Message) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": msgspec.json.decode(function["arguments"])}}
