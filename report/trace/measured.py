"""A run with its metrics, from which its panels are drawn."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from measure.metrics.results import TraceMetrics
from measure.runs import Run

if TYPE_CHECKING:
    from measure.metrics.prefixcache import CacheAnalysis


@dataclass(frozen=True, slots=True)
class Measured:
    """A trace and its metrics."""

    run: Run
    metrics: TraceMetrics
    analysis: "CacheAnalysis | None" = None
    """Null: the trace has no block hashes."""
