"""The steps that an engine ran, one after another: when each began and ended, and what it did."""

from typing import cast

import numpy as np
import numpy.typing as npt

from sim.features import StepRow

Floats = npt.NDArray[np.float64]


class Timeline:
    """Steps in order of time; they never overlap, and between them the engine is idle.

    On a core shared with the front end, the latter's work while the engine is idle is in here too, as a step of none
    of the engine's terms.
    """

    __slots__ = ("ends_ms", "rows", "starts_ms")

    def __init__(self) -> None:
        self.starts_ms: list[float] = []
        self.ends_ms: list[float] = []
        self.rows: list[StepRow] = []

    @classmethod
    def of_arrays(cls, starts_ms: Floats, ends_ms: Floats, rows: Floats) -> "Timeline":
        """A timeline that is complete; ``rows``: shape (steps, terms)."""
        timeline = cls()
        timeline.starts_ms, timeline.ends_ms = starts_ms.tolist(), ends_ms.tolist()
        timeline.rows = cast(list[StepRow], rows)  # its rows are read as any others
        return timeline

    def __len__(self) -> int:
        return len(self.ends_ms)

    @property
    def engine_steps(self) -> int:
        """Steps in which the engine itself computed."""
        return int(np.count_nonzero(np.asarray(self.rows)[:, 0])) if len(self) else 0

    def append(self, start_ms: float, end_ms: float, row: StepRow) -> None:
        """Add a step that began when or after the last one ended."""
        self.starts_ms.append(start_ms)
        self.ends_ms.append(end_ms)
        self.rows.append(row)

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
        assert len(self.starts_ms) == len(self.ends_ms) == len(self.rows)
        moments = [moment for pair in zip(self.starts_ms, self.ends_ms, strict=True) for moment in pair]
        assert moments == sorted(moments), "steps overlap"
