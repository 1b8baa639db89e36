"""Sessions of a load before any response: turns, token lengths, due times, and the keys of their tokens."""

import hashlib
import struct
from collections.abc import Sequence

import msgspec

from loadgen.core.draws import Stream
from loadgen.text.messages import PlannedMessage, SyntheticMessage, VerbatimMessage
from tracefile.hashing.splitmix64 import mix64

SESSION_FORM = struct.Struct("<QdQQ")
TURN_FORM = struct.Struct("<QQQd")


class TurnShape(msgspec.Struct, frozen=True, gc=False):
    """Turn: token lengths, the key of its new tokens, and the think time before it."""

    prompt_tokens: int
    """New tokens, without the context."""
    prompt_key: int
    output_tokens: int
    think_ms: float
    """From the end of the previous turn; 0 for a first turn."""
    quoted: Sequence[VerbatimMessage] = ()
    """Dataset messages before the output. Empty: one user message of ``prompt_tokens`` from ``prompt_key``."""

    def messages(self) -> Sequence[PlannedMessage]:
        return self.quoted or (SyntheticMessage("user", self.prompt_key, self.prompt_tokens),)

    @property
    def replacement_key(self) -> int:
        return mix64(self.prompt_key + Stream.REPLACEMENT_TOKENS)


class SessionShape(msgspec.Struct, frozen=True, gc=False):
    """Conversation, or single request: a session of one turn. Holds token lengths and keys, no tokens."""

    index: int
    due_ms: float | None
    """Due time of its first turn; null: as soon as another session ends (closed loop)."""
    prefix: int | None
    """Number of its shared prefix; null: none."""
    prefix_key: int
    turns: Sequence[TurnShape]


def session_digest(header: bytes, session: SessionShape) -> int:
    """SHA-256 of a session's draws and the header; equal: equal prompt tokens, except model name and outputs."""
    due_ms = -1.0 if session.due_ms is None else session.due_ms
    prefix_key = 0 if session.prefix is None else session.prefix_key
    parts = [header, SESSION_FORM.pack(session.index, due_ms, prefix_key, len(session.turns))]
    for turn in session.turns:
        parts.append(TURN_FORM.pack(turn.prompt_tokens, turn.prompt_key, turn.output_tokens, turn.think_ms))
        for quoted in turn.quoted:
            text = msgspec.json.encode(quoted.message)
            parts += [struct.pack("<Q", len(text)), text]  # with its length: two messages cannot equal one
    return int.from_bytes(hashlib.sha256(b"".join(parts)).digest(), "big")
