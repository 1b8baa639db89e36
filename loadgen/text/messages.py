"""Messages before the engine's tokens are known: drawn by key and length, or verbatim.

Messages of equal keys begin with equal tokens: a shorter one is the beginning of a longer one.
"""

from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class SyntheticMessage:
    """A message of ``tokens`` tokens drawn from ``key``; what a chat template adds is not in its length."""

    role: Role
    key: int
    tokens: int


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
            return "".join(str(block.get("text", "")) for block in content if isinstance(block, dict))
        return "" if content is None else str(content)


PlannedMessage = SyntheticMessage | VerbatimMessage
