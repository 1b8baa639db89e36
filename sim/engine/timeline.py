"""The steps that an engine ran, one after another: when each began and ended, and what it did."""

from typing import cast

import numpy as np
import numpy.typing as npt

from sim.latency.terms import StepRow

Floats = npt.NDArray[np.float64]


class Timeline:
    """Steps in order of time; they never overlap, and between them the engine is idle.

    On a core shared with the front end, the latter's work while the engine is idle is in here too, as a step of none
    of the engine's terms.
    """

    __slots__ = ("ends_ms", "rows", "seen_ms", "starts_ms")

    def __init__(self) -> None:
        self.starts_ms: list[float] = []
        self.ends_ms: list[float] = []
        self.rows: list[StepRow] = []
        self.seen_ms: list[float] = []
        """When clients see a step's tokens: at its end, or later where a first token is among them."""

    @classmethod
    def of_arrays(cls, starts_ms: Floats, ends_ms: Floats, rows: Floats, seen_ms: Floats) -> "Timeline":
        """A timeline that is complete; ``rows``: shape (steps, terms)."""
        timeline = cls()
        timeline.starts_ms, timeline.ends_ms = starts_ms.tolist(), ends_ms.tolist()
        timeline.rows = cast(list[StepRow], rows)  # its rows are read as any others
        timeline.seen_ms = seen_ms.tolist()
        return timeline

    def __len__(self) -> int:
        return len(self.ends_ms)

    @property
    def engine_steps(self) -> int:
        """Steps in which the engine itself computed."""
        return int(np.count_nonzero(np.asarray(self.rows)[:, 0])) if len(self) else 0

    def append(self, start_ms: float, end_ms: float, row: StepRow) -> None:
        """Add a step that began when or after the last one ended, and whose tokens are seen no sooner than its."""
        self.seen_ms.append(max(end_ms, self.seen_ms[-1]) if self.seen_ms else end_ms)
        self.starts_ms.append(start_ms)
        self.ends_ms.append(end_ms)
        self.rows.append(row)

    def delay(self, until_ms: float) -> None:
        """The last step's tokens are seen at ``until_ms``, unless they are only seen later than that."""
        self.seen_ms[-1] = max(self.seen_ms[-1], until_ms)

    def cumulative(self, width: int) -> Floats:
        """Sum of the rows of all steps before step k, for k = 0 … len, padded to ``width``; shape (len + 1, width)."""
        total = np.zeros((len(self) + 1, width))
        if len(self):
            rows = np.asarray(self.rows)
            np.cumsum(rows, axis=0, out=total[1:, : rows.shape[1]])
        return total

    def cumulative_at(self, times_ms: Floats, cumulative: Floats) -> Floats:
        """``cumulative`` at any times: a step in flight counts by the share of it that has passed; (n, terms)."""
        starts, ends = np.asarray(self.starts_ms), np.asarray(self.ends_ms)
        step = np.minimum(np.searchsorted(ends, times_ms, side="right"), len(self) - 1)
        passed = np.clip((times_ms - starts[step]) / np.maximum(ends[step] - starts[step], 1e-12), 0.0, 1.0)
        rows = cumulative[step + 1] - cumulative[step]
        return np.asarray(cumulative[step] + passed[:, None] * rows)

    def check_integrity(self) -> None:
        """Raise AssertionError unless steps follow each other."""
        assert len(self.starts_ms) == len(self.ends_ms) == len(self.rows) == len(self.seen_ms)
        assert self.seen_ms == sorted(self.seen_ms)
        moments = [moment for pair in zip(self.starts_ms, self.ends_ms, strict=True) for moment in pair]
        assert moments == sorted(moments), "steps overlap"
