"""Tokenizer without a model: an alphabet of short pieces that round-trips exactly.

A chat client sends an output back as text. To hit the blocks of the output, the text must encode to the generated ids,
which real tokenizers do not guarantee. Text is cut from the left into runs of at most three letters, a space before
them included, or three digits; other characters are UTF-8 bytes. English takes about two tokens per word. Outputs
consist of pieces of a space and three letters, whose text has a unique encoding.

0 … 255       single bytes
256 … 511     special tokens, spelled <|name|> or <|number|>
512 …         pieces; the ids above the last piece are spelled <|number|>
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from string import ascii_letters, ascii_lowercase, digits

import msgspec
import numpy as np

VOCABULARY_SIZE = 131_072
FIRST_SPECIAL, FIRST_PIECE = 256, 512
SPECIALS = ("end", "system", "user", "assistant", "tool", "developer", "tools", "calls", "message")
CACHED_TEXTS = 4096
"""Cached texts: a chat resends its history with each turn."""

_PIECES = re.compile(r"<\|[a-z0-9]+\|>| ?[A-Za-z][a-z]{0,2}|[0-9]{1,3}|.", re.DOTALL)
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvz", "aeiou"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A chat message, its content parts joined to one text."""

    role: str
    text: str


class Vocabulary:
    """``decode(encode(text)) == text`` for all text, and outputs encode to their token ids. Ids are below ``size``."""

    def __init__(self) -> None:
        self.size = VOCABULARY_SIZE
        self.end_id = FIRST_SPECIAL
        """Ends an output, and each message of a chat."""
        self._special = {name: FIRST_SPECIAL + index for index, name in enumerate(SPECIALS)}
        self._encode_cached = lru_cache(CACHED_TEXTS)(self._encode)
        # All tables are built here, so that the first request is as fast as later ones.
        self._spelling = self._spell_all()
        self._id_of = self._invert_spelling()
        words = (f" {a}{b}{c}" for a, b, c in product(_CONSONANTS, _VOWELS, _CONSONANTS))
        self.output_ids = np.array([self._id_of[word] for word in words], dtype=np.uint32)
        """Token ids of outputs: their text has a unique encoding in any context."""

    def _spell_all(self) -> list[bytes]:
        spelled = [bytes([byte]) for byte in range(FIRST_SPECIAL)]
        spelled += [f"<|{name}|>".encode() for name in SPECIALS]
        spelled += [f"<|{number}|>".encode() for number in range(len(spelled), FIRST_PIECE)]
        spelled += [piece.encode() for piece in _pieces()]
        return spelled + [f"<|{number}|>".encode() for number in range(len(spelled), self.size)]

    def _invert_spelling(self) -> dict[str, int]:
        ascii_bytes = {chr(byte): byte for byte in range(128)}
        later = {
            spelled.decode(): FIRST_SPECIAL + index for index, spelled in enumerate(self._spelling[FIRST_SPECIAL:])
        }
        return ascii_bytes | later

    def encode(self, text: str) -> list[int]:
        return list(self._encode_cached(text))

    def _encode(self, text: str) -> tuple[int, ...]:
        id_of = self._id_of
        token_ids: list[int] = []
        for piece in _PIECES.findall(text):
            token_id = id_of.get(piece)
            if token_id is not None:
                token_ids.append(token_id)
            else:
                token_ids.extend(piece.encode())
        return tuple(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; invalid UTF-8 becomes U+FFFD. Raises IndexError for an id beyond ``size``."""
        spelling = self._spelling
        return b"".join([spelling[token_id] for token_id in token_ids]).decode(errors="replace")

    def render_chat(self, messages: Sequence[Message], *, generation_prompt: bool) -> list[int]:
        """Return tokens of messages, each between its role's special token and ``<|end|>``, to prevent merges."""
        special = self._special
        token_ids: list[int] = []
        for message in messages:
            token_ids.append(special.get(message.role, special["message"]))
            token_ids += self._encode_cached(message.text)
            token_ids.append(self.end_id)
        if generation_prompt:
            token_ids.append(special["assistant"])
        return token_ids


def _pieces() -> Iterator[str]:
    tails = ["", *ascii_lowercase, *map("".join, product(ascii_lowercase, repeat=2))]
    for space in ("", " "):
        for head, tail in product(ascii_letters, tails):
            if space or tail:
                yield space + head + tail
    for length in (2, 3):
        yield from map("".join, product(digits, repeat=length))
