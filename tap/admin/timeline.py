"""Timeline of the last minutes, second by second: growth of totals that restart with their process, and levels."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

KEPT_SAMPLES: Final = 300
RATE_SAMPLES: Final = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """Numbers of about one second."""

    span_s: float
    """Seconds since the previous sample."""
    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    dropped: float = 0.0
    in_flight: int = 0
    queue_bytes: int = 0


class Growth:
    """Growth of a total over several processes; a total that restarts takes nothing back."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}

    def since_last(self, totals: Mapping[int, float]) -> float:
        """Return the growth since the last call; a new process's first total counts as no growth."""
        grown = 0.0
        for process, total in totals.items():
            last = self._last.get(process, total)
            grown += total - last if total >= last else total
            self._last[process] = total
        return grown


class Timeline:
    """Samples of the last minutes."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def line(self, value: Callable[[Sample], float]) -> list[float]:
        return [round(value(sample), 3) for sample in self._samples]

    def rate(self, value: Callable[[Sample], float]) -> float:
        last = list(islice(reversed(self._samples), RATE_SAMPLES))
        span_s = sum(sample.span_s for sample in last)
        return sum(map(value, last)) / span_s if span_s else 0.0
