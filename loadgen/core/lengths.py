"""Prompt and output lengths from flags: a number, a range or a distribution of tokens."""

import re
from argparse import ArgumentTypeError
from dataclasses import dataclass
from typing import Literal

from tracefile.commandline.durations import DURATION, duration
from tracefile.records.errors import InputError

DistributionShape = Literal["uniform", "normal", "lognormal", "zipf"]

UNBOUNDED = float(1 << 24)
"""Upper bound of a distribution without MAX, and the largest token count: beyond any context length."""

NUMBER = r"\d+(?:\.\d+)?"
FORMS = "N, MIN:MAX, normal:MEAN,SD[,MIN,MAX], lognormal:MEAN,SD[,MIN,MAX] or zipf:S,MIN,MAX"


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Distribution of values from ``low`` to ``high``, inclusive; default shape: uniform.

    ``normal`` and ``lognormal``: mean and deviation before clipping to the bounds. ``zipf``: weight = value to the −S.
    """

    low: float
    high: float
    shape: DistributionShape = "uniform"
    mean: float = 0.0
    sd: float = 0.0
    exponent: float = 0.0

    def __str__(self) -> str:
        if self.shape == "uniform":
            return f"{self.low:.12g}" if self.low == self.high else f"{self.low:.12g}:{self.high:.12g}"
        ends = f"{self.low:.12g},{self.high:.12g}"
        if self.shape == "zipf":
            return f"zipf:{self.exponent:.12g},{ends}"
        cut = "" if self.high == UNBOUNDED else f",{ends}"
        return f"{self.shape}:{self.mean:.12g},{self.sd:.12g}{cut}"


def parse_lengths(flag: str, text: str, *, minimum: float, integers: bool) -> LengthDistribution:
    """Parse a length distribution (``FORMS``). Raises InputError with the flag."""
    text = text.strip()
    expected = f"expected {'integers' if integers else 'numbers'} of {minimum:g} or more as {FORMS}"
    named = re.fullmatch(rf"(normal|lognormal|zipf):({NUMBER}(?:,{NUMBER})*)", text)
    if named is not None:
        lengths = _distribution(named[1], [float(value) for value in named[2].split(",")], minimum)
    else:
        number = r"\d+" if integers else NUMBER
        match = re.fullmatch(rf"({number})(?::({number}))?", text)
        lengths = None if match is None else LengthDistribution(float(match[1]), float(match[2] or match[1]))
    if lengths is None or (integers and (lengths.low % 1 or lengths.high % 1)):
        raise InputError(f"{flag}: {text!r}; {expected}")
    if lengths.low < minimum or lengths.high < lengths.low:
        raise InputError(f"{flag}: {text!r}; {expected}, MIN not above MAX")
    return lengths


def parse_tokens(flag: str, text: str | None) -> LengthDistribution | None:
    """Parse a length in tokens, 1 or more. None: the flag was not given."""
    if text is None:
        return None
    lengths = parse_lengths(flag, text, minimum=1, integers=True)
    if max(lengths.high, lengths.mean) > UNBOUNDED:
        raise InputError(f"{flag}: {text!r}; expected at most {UNBOUNDED:,.0f}")
    return lengths


def parse_pause(flag: str, text: str) -> LengthDistribution:
    """Parse think times in seconds, with a unit on every time: ``2s``, ``1s:5s``, ``lognormal:2s,500ms``."""
    bare = re.sub(r"^zipf:[^,]*,", "", DURATION.sub("", text.strip()))
    if number := next((digits for digits in re.findall(NUMBER, bare) if float(digits)), None):
        raise InputError(f"{flag}: {text!r}: {number} has no unit; expected {number}s or {number}ms")
    try:
        seconds = DURATION.sub(lambda match: f"{duration(match[0]):.9f}", text)
        return parse_lengths(flag, seconds, minimum=0, integers=False)
    except ArgumentTypeError as error:
        raise InputError(f"{flag}: {error}") from None
    except InputError:
        raise InputError(f"{flag}: {text!r}; expected times with units, such as 2s or 500ms, as {FORMS}") from None


def _distribution(name: str, values: list[float], minimum: float) -> LengthDistribution | None:
    """Distribution of that name; null: wrong parameters."""
    if name == "zipf":
        return (
            LengthDistribution(values[1], values[2], "zipf", exponent=values[0])
            if len(values) == 3 and values[1] > 0
            else None
        )
    if len(values) not in (2, 4) or values[0] <= 0:
        return None
    low, high = values[2:] or (minimum, UNBOUNDED)
    return LengthDistribution(low, high, "normal" if name == "normal" else "lognormal", mean=values[0], sd=values[1])
