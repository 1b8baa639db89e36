"""What one loadgen run is, checked once, before anything is sent."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loadgen.draws import ORDINARY, Vocabulary
from tracefile import InputError

Pattern = Literal["constant", "poisson", "multiturn"]
Api = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True)
class Span:
    """A uniform range, both ends included; ``low == high`` is a constant."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g}:{self.high:g}"


def parse_span(flag: str, text: str, *, minimum: float, whole: bool) -> Span:
    """``N`` or ``MIN:MAX``; raises InputError naming the flag."""
    number = r"\d+" if whole else r"\d+(?:\.\d+)?"
    expected = f"expected {'a whole number' if whole else 'a number'} N or MIN:MAX, each {minimum:g} or more"
    found = re.fullmatch(rf"({number})(?::({number}))?", text.strip())
    if found is None:
        raise InputError(f"{flag}: {text!r}; {expected}")
    low = float(found[1])
    high = float(found[2]) if found[2] is not None else low
    if low < minimum or high < low:
        raise InputError(f"{flag}: {text!r}; {expected}, MIN not above MAX")
    return Span(low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """One run: what to send (lengths, prefixes, turns), when (pattern, rate, bounds), where, and the trace to write."""

    url: str
    trace: Path
    model: str = "auto"
    api: Api = "completions"
    pattern: Pattern = "poisson"
    rate: float | None = None
    """Sessions (multiturn) or requests a second; null: closed loop, ``parallel`` at a time."""
    duration_s: float | None = None
    """No session starts after it; those in flight finish. Null: until ``number``."""
    number: int | None = None
    """Sessions (multiturn) or requests; null: until ``duration_s``."""
    parallel: int | None = None
    """Most requests in flight; null: no limit."""
    seed: int = 0
    prompt_tokens: Span = Span(256, 256)
    """New tokens of each turn, the shared prefix not counted."""
    output_tokens: Span = Span(16, 16)
    prefix_count: int = 0
    """Shared prefixes to choose from; 0: none."""
    prefix_tokens: int = 0
    turns: int = 1
    think_s: Span = Span(0, 0)
    """From a turn's end to the next one's send."""
    vocabulary: Vocabulary = ORDINARY
    timeout_s: float | None = 600.0
    overwrite: bool = False
    summary: Path | None = None
    """Where the summary goes as JSON; null: nowhere."""

    def __post_init__(self) -> None:
        _check_bounds(self)
        _check_shape(self)


def _check_bounds(config: LoadConfig) -> None:
    _check_positive("--rate", config.rate)
    _check_positive("--duration", config.duration_s)
    _check_positive("--number", config.number)
    _check_positive("--parallel", config.parallel)
    _check_positive("--timeout-s", config.timeout_s)
    if config.rate is None and config.parallel is None:
        raise InputError("--rate: missing; expected arrivals a second, or --parallel for a closed loop")
    if config.duration_s is None and config.number is None:
        raise InputError("--duration, --number: both missing; expected a bound, or the run would never end")


def _check_shape(config: LoadConfig) -> None:
    _check_positive("--turns", config.turns)
    if config.prefix_count < 0 or config.prefix_tokens < 0:
        raise InputError("--prefix-count, --prefix-tokens: negative; expected 0 or more")
    if (config.prefix_count > 0) != (config.prefix_tokens > 0):
        raise InputError(
            f"--prefix-count, --prefix-tokens: {config.prefix_count} prefixes of {config.prefix_tokens} tokens; "
            "expected both above 0, or neither"
        )
    if config.turns > 1 and config.pattern != "multiturn":
        raise InputError(f"--turns: {config.turns} with --pattern {config.pattern}; expected --pattern multiturn")


def _check_positive(flag: str, value: float | None) -> None:
    if value is not None and not (0 < value < math.inf):
        raise InputError(f"{flag}: {value:g}; expected a number above 0")
