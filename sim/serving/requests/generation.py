"""Outputs in progress: the scheduler's request, and the tokens its client may see by now."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from sim.serving.requests.answer import Answer
from sim.vllm.request import Request

Outcome = Literal["finished", "aborted"]


@dataclass(slots=True, eq=False)
class Generation:
    """An output of a real-time engine; made by the service, advanced by the engine."""

    request: Request
    answer: Answer
    on_progress: Callable[["Generation"], None]
    """Called after ``delivered`` grew or ``outcome`` was set, on the event loop."""
    place: int = 0
    """Which of its response's choices it is."""
    delivered: int = 0
    """Tokens of the answer that exist by now."""
    outcome: Outcome | None = None
    """None: not ended."""
    arrival_ms: float = 0.0
    entered: bool = False
    """Whether the scheduler has it."""
    token_ms: list[float] = field(default_factory=list)
    """When the first and the latest token appeared, on the engine's clock."""
