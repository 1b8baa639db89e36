"""AIPerf's multi-turn conversations, JSON Lines: ``{"session_id", "turns": [{"text", "delay", "output_length"}]}``.

Defined by ``MultiTurn`` and ``SingleTurn`` in aiperf/dataset/loader/models.py (0.13): ``delay`` is milliseconds after
the answer before, a leading turn of role ``system`` with a text alone is the conversation's system message, and rows
of one ``session_id`` are one conversation. ``timestamp`` is their fixed schedule; here arrivals are the pattern's.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from loadgen.datasets.rows import decode, rows
from loadgen.datasets.session import DatasetOptions, DatasetSession, DatasetTurn
from loadgen.text.messages import VerbatimMessage
from tracefile import InputError

EXPECTED = "an AIPerf multi-turn conversation: session_id and turns of text, delay, output_length"
NOT_TEXT = ("image", "images", "image_uuids", "audio", "audios", "video", "videos", "extra")


class AiperfTurn(msgspec.Struct):
    """Turn of a conversation; media and extra request fields are read to be refused."""

    text: str | None = None
    texts: list[str] | None = None
    delay: Annotated[float, Meta(ge=0)] | None = None
    timestamp: float | None = None
    role: str | None = None
    output_length: Annotated[int, Meta(gt=0)] | None = None
    image: Any = None
    images: Any = None
    image_uuids: Any = None
    audio: Any = None
    audios: Any = None
    video: Any = None
    videos: Any = None
    extra: Any = None


class AiperfRow(msgspec.Struct):
    """Row: a conversation, or part of a conversation."""

    turns: list[AiperfTurn]
    session_id: str | None = None


def read_aiperf(path: Path, options: DatasetOptions) -> Iterator[DatasetSession]:
    """Sessions by ``session_id``, in order of first rows; a row without one is a session."""
    conversations: dict[object, list[tuple[str, AiperfTurn]]] = {}
    for where, row in rows(path):
        found = decode(row, AiperfRow, where, EXPECTED)
        if not found.turns:
            raise InputError(f"{where}: turns: empty; expected {EXPECTED}")
        key = where if found.session_id is None else ("session", found.session_id)
        turns = conversations.setdefault(key, [])
        turns += [(f"{where}: turns: turn {number}", turn) for number, turn in enumerate(found.turns, start=1)]
    return (_session(turns) for turns in conversations.values())


def _session(turns: list[tuple[str, AiperfTurn]]) -> DatasetSession:
    made = [_turn(where, turn) for where, turn in turns]
    if len(made) > 1 and _is_system(turns[0][1]):
        return [replace(made[1], quoted=(made[0].quoted[0], *made[1].quoted)), *made[2:]]
    return made


def _turn(where: str, turn: AiperfTurn) -> DatasetTurn:
    for name in NOT_TEXT:
        if getattr(turn, name) is not None:
            raise InputError(f"{where}: {name}: present; expected text alone")
    texts = turn.texts if turn.texts is not None else [turn.text] if turn.text else []
    if not texts:
        raise InputError(f"{where}: text: missing; expected text or texts")
    content = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    quoted = VerbatimMessage({"role": turn.role or "user", "content": content})
    return DatasetTurn(quoted=(quoted,), output_tokens=turn.output_length, think_ms=turn.delay)


def _is_system(turn: AiperfTurn) -> bool:
    return turn.role == "system" and turn.delay is turn.timestamp is turn.output_length is None
