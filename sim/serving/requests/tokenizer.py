"""A real tokenizer as the server's vocabulary: its ids, its chat template, answers from its plainest words."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engines.tokenizer import load_tokenizer, tokenizer_folder
from sim.serving.requests.vocabulary import Message
from tracefile.records.errors import InputError

MAX_ANSWER_IDS = 4096
PLAIN_TEMPLATE = (
    "{%- for message in messages -%}[{{ message.role }}]:{{ message.content }}\n{% endfor -%}"
    "{%- if add_generation_prompt -%}[assistant]:{%- endif -%}"
)
"""For a tokenizer that brings no chat template. Content follows the colon at once, as an answer does."""


class TokenizerVocabulary:
    """A transformers tokenizer from a directory. Raises InputError if there is none.

    Answers come from words that the tokenizer, on their own and in a row, cuts as they were generated; text sent back
    is therefore the same ids wherever the chat template keeps it apart from its neighbours.
    """

    def __init__(self, path: Path) -> None:
        self._tokenizer = load_tokenizer(tokenizer_folder(path))
        self.size = len(self._tokenizer)
        self.end_id = self._tokenizer.eos_token_id if self._tokenizer.eos_token_id is not None else 0
        self.answer_ids = self._plain_words(path)

    def _plain_words(self, path: Path) -> npt.NDArray[np.uint32]:
        words = []
        for token_id in range(self.size):
            text = self._tokenizer.decode([token_id])
            word = text[1:]
            if text[:1] == " " and len(word) >= 3 and word.isascii() and word.isalpha() and word.islower():
                words.append(token_id)
                if len(words) == MAX_ANSWER_IDS:
                    break
        kept = [word for word in words if self.encode(self.decode([word, words[0]])) == [word, words[0]]]
        if not kept:
            raise InputError(f"--tokenizer {path}: no word survives re-tokenization; expected a text tokenizer")
        return np.array(kept, dtype=np.uint32)

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return text

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Any], *, answer: bool) -> list[int]:
        """The tokenizer's own chat template, or a plain one if it has none."""
        conversation = [
            {"role": message.role, "content": message.text}
            | ({"tool_calls": list(message.tool_calls)} if message.tool_calls else {})
            for message in messages
        ]
        text: str = self._tokenizer.apply_chat_template(
            msgspec.to_builtins(conversation),
            tools=list(tools) or None,
            chat_template=self._tokenizer.chat_template or PLAIN_TEMPLATE,
            add_generation_prompt=answer,
            tokenize=False,
        )
        return self.encode(text)

    def spell_call(self, name: str, arguments: str) -> tuple[list[int], list[int], list[int]]:
        """Return the ids of a call as Hermes and Qwen models write it; under another template, other ids come back."""
        opening = f'<tool_call>\n{{"name": {msgspec.json.encode(name).decode()}, "arguments": '
        return self.encode(opening), self.encode(arguments), self.encode("}\n</tool_call>")
