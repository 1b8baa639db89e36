"""Events of a stream that differ in their text and their token id alone, as nearly all of a stream's do.

A template is the bytes of one such event around its text and its id. An event with the same bytes around needs no JSON
decoder and no look at its fields: it is known to be equal in all else.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from wire.events import Choice, Event, choice_text, has_unspoken

_TEXT = rb'([^\x00-\x1f"\\]+)'
"""Bytes that a JSON string holds as they are."""
_ID = rb"(0|[1-9][0-9]{0,8})"
_IDS_KEYS = (b'"token_ids":[', b'"token_ids": [')


class EventTemplate(NamedTuple):
    """Bytes of an event before its text and behind its text and token id, and the pattern of what lies between."""

    before: bytes
    values: re.Pattern[bytes]
    behind: bytes

    def match(self, data: bytes) -> re.Match[bytes] | None:
        """Return a match with the text and the token id (empty: events have none); null: another event."""
        before, values, behind = self
        if data.startswith(before) and data.endswith(behind):
            return values.fullmatch(data, len(before), len(data) - len(behind))
        return None


@lru_cache(maxsize=64)
def _values(between: bytes) -> re.Pattern[bytes]:
    """Return the pattern of text and id; streams of an engine have one ``between``, empty without ids."""
    return re.compile(_TEXT + (re.escape(between) + _ID if between else b"()"))


def template_of(data: bytes, event: Event) -> EventTemplate | None:
    """Return the template of an event, of its data and what that says; null: it holds more than a text and an id."""
    choices = event.choices or []
    if b"\\" in data or len(choices) != 1 or _has_more(event, choices[0]):
        return None
    text, token_ids = choice_text(choices[0]).encode(), choices[0].token_ids
    before, quoted, rest = data.partition(b'"%b"' % text)
    if not text or not quoted or quoted in rest:  # written once in all the event, it is the text and nothing else
        return None
    before, rest = b'%b"' % before, b'"%b' % rest
    if token_ids is None:
        return EventTemplate(before, _values(b""), rest)
    if len(token_ids) == 1 and data.count(b'"token_ids"') == 1:
        for key in _IDS_KEYS:
            between, number, behind = rest.partition(b"%b%d]" % (key, token_ids[0]))
            if number:
                return EventTemplate(before, _values(between + key), b"]" + behind)
    return None


def _has_more(event: Event, choice: Choice) -> bool:
    """Return whether an event says what makes it differ from its stream's other events."""
    if event.usage or event.timings or event.error or event.prompt_token_ids or event.object == "error":
        return True
    ends = choice.index or choice.finish_reason or choice.prompt_token_ids or choice.response_token_ids
    return bool(ends) or has_unspoken(choice)
