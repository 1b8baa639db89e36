"""Conversations of OpenAI messages, JSON Lines: an array of messages a line, or an object with ``messages``.

An array a line is evalscope's ``custom_multi_turn`` (evalscope/perf/plugin/datasets/custom.py); ``messages`` in an
object is OpenAI's format for fine-tuning, and, within ``body``, for batches. Tools that a row offers are not sent.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from loadgen.datasets.conversation import session_of
from loadgen.datasets.rows import convert, decode, rows
from loadgen.datasets.session import DatasetOptions, DatasetSession
from tracefile import InputError

EXPECTED = "an array of messages, each an object with role and content, or an object with messages"


class MessageRow(msgspec.Struct):
    """What every message needs."""

    role: str
    content: str | list[dict[str, Any]] | None = None


def read_messages(path: Path, options: DatasetOptions) -> Iterator[DatasetSession]:
    """A session a row."""
    for where, row in rows(path):
        messages = messages_of(decode(row, object, where, EXPECTED), where)
        yield session_of(messages, options)


def messages_of(found: Any, where: str) -> list[dict[str, Any]]:
    """The messages of a row, checked; raises InputError."""
    if isinstance(found, dict):
        body = found.get("body")
        found = (body if isinstance(body, dict) else found).get("messages")
        where = f"{where}: messages"
    if not isinstance(found, list) or not found:
        raise InputError(f"{where}: no messages; expected {EXPECTED}")
    for number, message in enumerate(found):
        convert(message, MessageRow, f"{where}: message {number + 1}", EXPECTED)
    return found
