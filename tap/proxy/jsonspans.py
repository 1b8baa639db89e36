"""Places of the parts of a JSON text, so that bytes change in place and all others stay unchanged.

msgspec walks over the values, in C, and Python over the keys only. So a prompt of megabytes costs only its skipping.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from wire.jsonsize import fits_in_memory

WHITESPACE = b" \t\r\n"

_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
# Possessive: a long name costs its length, and no place to go back to for each of its characters.
_BEFORE_VALUE = re.compile(rb'[{,\s]*+"(?:[^"\\]++|\\.)*+"\s*+:\s*+', re.DOTALL)
_BEFORE_KEY = re.compile(rb"[{,\s]*")


MAX_MEMBERS = 10_000
"""Members of an object that are located; each costs a microsecond of the event loop."""
MAX_NAMES_CHARS = 1 << 16
"""Length of all their names; a megabyte of escaped characters costs 15 ms of the event loop."""


class UnlocatableError(Exception):
    """Not JSON, not of the expected kind, too large in memory, or with a name twice, whose meaning is unsure."""


class Span(NamedTuple):
    """Bytes ``start`` up to ``end`` of a text."""

    start: int
    end: int

    def of(self, text: bytes) -> bytes:
        return text[self.start : self.end]


class Member(NamedTuple):
    """A member of an object, from the opening quote of its name to the last byte of its value."""

    start: int
    value: Span


class Edit(NamedTuple):
    """New bytes for a span."""

    start: int
    end: int
    new: bytes


def object_members(text: bytes, span: Span | None = None) -> dict[str, Member]:
    at, end = span or (0, len(text))
    if not fits_in_memory(text):
        raise UnlocatableError
    try:
        values = _decode_members(memoryview(text)[at:end])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UnlocatableError from None
    if len(values) > MAX_MEMBERS or sum(map(len, values)) > MAX_NAMES_CHARS:
        raise UnlocatableError
    members: dict[str, Member] = {}
    for name, raw in values.items():
        plain = b'"%b":' % name.encode()
        if text.startswith(plain, at + 1) and text[at + 1 + len(plain)] not in WHITESPACE:  # as engines write it
            start = at + 1
            at = start + len(plain)
        else:
            before_key, before_value = _BEFORE_KEY.match(text, at), _BEFORE_VALUE.match(text, at)
            if before_key is None or before_value is None:
                raise UnlocatableError
            start, at = before_key.end(), before_value.end()
        value_end = at + len(memoryview(raw))
        members[name] = Member(start, Span(at, value_end))
        at = value_end
    if text[at:end].strip(WHITESPACE + b"{") != b"}":
        raise UnlocatableError  # a name came twice, and only one of its values was counted
    return members


def apply_edits(text: bytes, edits: Sequence[Edit]) -> bytes:
    pieces: list[bytes] = []
    at = 0
    for edit in sorted(edits):
        pieces += (text[at : edit.start], edit.new)
        at = edit.end
    pieces.append(text[at:])
    return b"".join(pieces)
