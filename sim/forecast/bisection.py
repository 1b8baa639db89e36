"""The hardest value that holds, of something that gets harder from one end to the other, though not at every step.

A forecast is monotone in expectation only: of two pools that are a block apart the larger may do worse. So the values
around an answer are tried too, and it stands only if every value tried on its easy side holds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

NEIGHBOURS = 2
"""Steps to either side of an answer that are tried."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from an easy end to a hard one, by steps of ``tolerance`` of themselves, or of one if they are counts."""

    easy: float
    hard: float
    tolerance: float
    counts: bool

    def step(self, value: float) -> float:
        """Distance of two values that are next to each other."""
        step = self.tolerance * value
        return max(1.0, math.floor(step)) if self.counts else step

    def middle(self, one: float, other: float) -> float | None:
        """Between the two on a logarithmic scale; None: they are next to each other."""
        if abs(one - other) <= self.step(min(one, other)) * (1.0 + 1e-9):
            return None
        middle = self.rounded(math.sqrt(one * other))
        return None if middle in (one, other) else middle

    def neighbours(self, value: float) -> list[float]:
        """Those up to ``NEIGHBOURS`` steps from ``value``, ends not passed."""
        low, high = sorted((self.easy, self.hard))
        around = [value + sign * place * self.step(value) for place in range(1, NEIGHBOURS + 1) for sign in (-1, 1)]
        return [self.rounded(min(max(one, low), high)) for one in around]

    def rounded(self, value: float) -> float:
        """As it is tried and said: a count whole, a rate to five digits."""
        return float(round(value)) if self.counts else float(f"{value:.5g}")

    def in_order(self, values: list[float]) -> list[float]:
        """From the easy end on."""
        return sorted(values, reverse=self.easy > self.hard)


def bisect(scale: Scale, holds: Callable[[float], bool]) -> float | None:
    """The hardest value that holds with every easier one that was tried; None: not even the easy end does.

    ``holds`` is asked once a value, the ends first.
    """
    tried = {scale.easy: holds(scale.easy)}
    if not tried[scale.easy]:
        return None
    tried.setdefault(scale.hard, scale.hard in tried or holds(scale.hard))
    while True:
        good, bad = edge(scale, tried)
        value = None if bad is None else scale.middle(good, bad)
        if value is None:
            value = next((one for one in scale.neighbours(good) if one not in tried), None)
        if value is None:
            return good
        tried[value] = holds(value)


def edge(scale: Scale, tried: dict[float, bool]) -> tuple[float, float | None]:
    """The last value from the easy end on before which all that were tried hold, and the next one, which does not."""
    good = scale.easy
    for value in scale.in_order(list(tried)):
        if not tried[value]:
            return good, value
        good = value
    return good, None
