"""The last minutes second by second: what grew, from totals that start over when a process does, and what there was."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

KEPT_SAMPLES: Final = 300
RATE_SAMPLES: Final = 10
"""What a rate is a mean over."""


@dataclass(frozen=True, slots=True)
class Sample:
    """About one second."""

    span_s: float
    """Seconds since the sample before."""
    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    dropped: float = 0.0
    in_flight: int = 0
    queue_bytes: int = 0


class Growth:
    """A total that several processes add to, as what it grew by; one that starts over takes nothing back."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}

    def since_last(self, totals: Mapping[int, float]) -> float:
        """What came since the last call; the first total under a number only says where its counting starts."""
        grown = 0.0
        for process, total in totals.items():
            last = self._last.get(process, total)
            grown += total - last if total >= last else total
            self._last[process] = total
        return grown


class Timeline:
    """The samples of the last minutes."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)

    def add(self, sample: Sample) -> None:
        """Add the latest second."""
        self._samples.append(sample)

    def line(self, value: Callable[[Sample], float]) -> list[float]:
        """One value of every sample, oldest first."""
        return [round(value(sample), 3) for sample in self._samples]

    def rate(self, value: Callable[[Sample], float]) -> float:
        """What a value came to per second lately."""
        last = list(islice(reversed(self._samples), RATE_SAMPLES))
        span_s = sum(sample.span_s for sample in last)
        return sum(map(value, last)) / span_s if span_s else 0.0
