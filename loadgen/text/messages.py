"""Messages before the engine's tokens are known: drawn by key and length, or verbatim.

Equal pieces in equal places are equal tokens: messages share tokens by drawing from the same key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Piece:
    """``tokens`` tokens drawn from ``key``; a shorter piece of the same key is the beginning of a longer one."""

    key: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SyntheticMessage:
    """A message whose content is its pieces, one after another; what a chat template adds is not in its length."""

    role: Role
    pieces: Sequence[Piece]
    call: Piece | None = None
    """Of a ``tool`` message: the arguments of the call that it answers, which go into the assistant's message before it
    after the model's response. Null: the shortest call there is."""

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class VerbatimMessage:
    """Message of chat completions sent unchanged; on other APIs, only its texts."""

    message: dict[str, Any]

    @property
    def role(self) -> str:
        return str(self.message.get("role", "user"))

    @property
    def text(self) -> str:
        content = self.message.get("content")
        if isinstance(content, list):
            return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        return "" if content is None else str(content)


PlannedMessage = SyntheticMessage | VerbatimMessage


def drawn_user(key: int, tokens: int) -> tuple[PlannedMessage, ...]:
    return (SyntheticMessage("user", (Piece(key, tokens),)),)
