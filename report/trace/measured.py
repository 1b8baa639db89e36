"""A run with its metrics, from which its panels are drawn."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from measure.metrics.results import TraceMetrics
from measure.runs import UNKNOWN, Run
from tracefile.records.extras import is_lacking, lacking

if TYPE_CHECKING:  # numba, which a trace without hashes need not load
    from measure.metrics.prefixcache import CacheStudy


@dataclass(frozen=True, slots=True)
class Measured:
    """A trace and its metrics."""

    run: Run
    metrics: TraceMetrics
    study: "CacheStudy | None" = None
    """Null: the trace has no block hashes, or numba is not installed."""

    @property
    def left_out(self) -> str:
        """Reason why a trace with block hashes has no study. Empty: it has one, or no hashes."""
        if self.study is not None or not is_lacking("numba") or (self.run.reusable_tokens == UNKNOWN).all():
            return ""
        return f"hits at every cache size left out: {lacking('numba')}"
