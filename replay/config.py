"""What one replay is, checked once, before anything is sent."""

import math
from dataclasses import dataclass
from pathlib import Path

from loadgen.draws import ORDINARY, Vocabulary
from tracefile import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """One run: the captured trace, how its times and sharing are kept, where it goes, and the trace to write."""

    source: Path
    url: str
    trace: Path
    nonce: str
    """What keeps this run's tokens apart from any other run's."""
    model: str = "auto"
    replay_sessions: bool = False
    """Follow-ups wait for their parent's end instead of their recorded time."""
    cold_prompts: bool = False
    """Every request gets tokens of its own."""
    speedup: float = 1.0
    """Divisor of arrival offsets and think times."""
    max_think_s: float | None = None
    """Longer pauses are cut to this; null: kept."""
    limit: int | None = None
    """Only the first so many requests by arrival; null: all."""
    reset_cache: bool = False
    vocabulary: Vocabulary = ORDINARY
    timeout_s: float | None = 600.0
    overwrite: bool = False
    summary: Path | None = None
    """Where the summary goes as JSON; null: nowhere."""

    def __post_init__(self) -> None:
        for flag, value in {
            "--speedup": self.speedup,
            "--limit": self.limit,
            "--timeout-s": self.timeout_s,
        }.items():
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{flag}: {value:g}; expected a number above 0")
        if self.max_think_s is not None and not 0 <= self.max_think_s < math.inf:
            raise InputError(f"--max-think-s: {self.max_think_s:g}; expected 0 or more")
        if not self.nonce:
            raise InputError("--nonce: empty; expected a word")
