"""Loads for each client: two as fast as it can, two at a rate."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Load, and how the server answers it."""

    name: str
    output_tokens: int
    prompt_tokens: int = 256
    rate: float | None = None
    """Requests a second at equal gaps; null: ``parallel`` in flight all the time."""
    parallel: int = 64
    duration_s: float
    server: tuple[str, ...]
    """Flags of the built-in server."""

    @property
    def saturating(self) -> bool:
        """Return whether the client goes as fast as it can."""
        return self.rate is None


AT_ONCE = ("--tokens-per-write", "16")
PACED = ("--ttft-ms", "20:80", "--gap-ms", "10", "--tokens-per-write", "1")


def cases(duration_s: float) -> list[Case]:
    """All, each of about that length."""
    return [
        Case(name="short", output_tokens=16, duration_s=duration_s, server=AT_ONCE),
        Case(name="long", output_tokens=256, duration_s=duration_s, server=AT_ONCE),
        Case(name="rate50", output_tokens=64, rate=50.0, duration_s=2 * duration_s, server=PACED),
        Case(name="rate200", output_tokens=64, rate=200.0, duration_s=2 * duration_s, server=PACED),
    ]
