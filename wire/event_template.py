"""Events of a stream that differ in their text and their token id alone, as nearly all of a stream's do.

A template is the bytes of one such event around its text and its id. A read whose bytes are the template's, again and
again, needs no JSON decoder, which takes several times as long: its events are known to be equal in all else.
"""

import re
from typing import NamedTuple

from wire.events import Choice, Event, choice_text, has_unspoken

_TEXT = re.compile(rb'"(?:text|content)": ?"([^"\\]+)"')
_IDS = re.compile(rb'"token_ids": ?\[(\d{1,9})\]')
_SAFE = re.compile(rb"[^\x00-\x1f\"\\]+")
"""Bytes that a JSON string holds as they are."""
_ID = re.compile(rb"0|[1-9][0-9]{0,8}")


class EventTemplate(NamedTuple):
    """Bytes of an event before its text, between text and token id, and behind; ``between`` is empty without ids."""

    before: bytes
    between: bytes
    behind: bytes

    def match(self, read: bytes) -> tuple[list[str], list[int], int]:
        """Return texts and token ids (none without ``between``) of the events of this template that a read begins with.

        Each is a token. The last value is their number of bytes.
        """
        before, between, behind = self
        texts: list[str] = []
        ids: list[int] = []
        at = 0
        if not read.startswith(before):
            return texts, ids, at
        *parts, last = read[len(before) :].split(behind + before)
        last, end, _ = last.partition(behind)
        for part in (*parts, last) if end else parts:
            text, _, number = part.partition(between) if between else (part, b"", b"")
            if not _SAFE.fullmatch(text) or (between and not _ID.fullmatch(number)):
                break
            try:
                texts.append(text.decode())
            except UnicodeDecodeError:
                break
            if between:
                ids.append(int(number))
            at += len(before) + len(part) + len(behind)
        return texts, ids, at


def template_of(data: bytes, event: Event) -> EventTemplate | None:
    """Return the template of an event, of its data and what that says; null: it holds more than a text and an id."""
    choices = event.choices or []
    if b"\n" in data or b"\\" in data or len(choices) != 1 or _has_more(event, choices[0]):
        return None
    texts, ids, token_ids = list(_TEXT.finditer(data)), list(_IDS.finditer(data)), choices[0].token_ids
    if len(texts) != 1 or texts[0][1].decode() != choice_text(choices[0]) or len(ids) != len(token_ids or ()):
        return None
    before, rest = b"data: " + data[: texts[0].start(1)], data[texts[0].end(1) :] + b"\n\n"
    if token_ids is None:
        return EventTemplate(before, b"", rest)
    number = b"%d]" % token_ids[0] if len(ids) == 1 and data.count(b'"token_ids"') == 1 else b""
    if number and rest.count(number) == 1:
        between, _, behind = rest.partition(number)
        return EventTemplate(before, between, b"]" + behind)
    return None


def _has_more(event: Event, choice: Choice) -> bool:
    """Return whether an event says what makes it differ from its stream's other events."""
    if event.usage or event.timings or event.error or event.prompt_token_ids or event.object == "error":
        return True
    ends = choice.index or choice.finish_reason or choice.prompt_token_ids or choice.response_token_ids
    return bool(ends) or has_unspoken(choice)
