"""Messages before the engine's tokens are known: drawn by key and token count, or verbatim.

Messages of equal keys share a prefix: the shorter message is a prefix of the longer.
"""

from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class SyntheticMessage:
    """Message of ``tokens`` tokens drawn from ``key``, without the tokens of the chat template."""

    role: Role
    key: int
    tokens: int


@dataclass(frozen=True, slots=True)
class VerbatimMessage:
    """Chat message sent unchanged; on other APIs, only its texts."""

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
