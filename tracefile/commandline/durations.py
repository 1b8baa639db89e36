"""Durations on the command line, such as ``250ms`` or ``1.5h``; a number other than ``0`` needs a unit."""

import argparse
import re
from decimal import Decimal
from typing import Final

UNIT_SECONDS: Final = {
    "d": Decimal(86_400),
    "h": Decimal(3600),
    "m": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("0.001"),
}
LONGEST_S: Final = 36_500 * 86_400
"""100 years: the nanoseconds fit into 64 bits."""
NUMBER: Final = r"(?:\d+(?:\.\d+)?|\.\d+)"
DURATION: Final = re.compile(rf"(?P<number>{NUMBER})(?P<unit>ms|s|m|h|d)")


def seconds(text: str) -> float:
    """Parse a duration into seconds; a number without a unit is in seconds, as in other load generators."""
    return _bounded(text, float(text)) if re.fullmatch(NUMBER, text) else duration(text)


def duration(text: str) -> float:
    """Parse a duration into seconds, as the ``type`` of a flag; raises ArgumentTypeError."""
    match = DURATION.fullmatch(text)
    if match is not None:
        return _bounded(text, float(Decimal(match["number"]) * UNIT_SECONDS[match["unit"]]))
    if re.fullmatch(NUMBER, text):
        if float(text) == 0.0:
            return 0.0
        raise argparse.ArgumentTypeError(f"{text!r} has no unit; expected {text}s, {text}ms, {text}m or {text}h")
    raise argparse.ArgumentTypeError(f"{text!r}; expected a number and its unit, such as 250ms, 30s, 5m, 1.5h or 30d")


def _bounded(text: str, value_s: float) -> float:
    if value_s > LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r}; expected at most {LONGEST_S // 86_400}d")
    return value_s
