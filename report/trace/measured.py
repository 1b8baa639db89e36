"""Run with its metrics, the input of its panels."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from measure.metrics.results import TraceMetrics
from measure.runs import Run

if TYPE_CHECKING:
    from measure.metrics.prefixcache import CacheAnalysis


@dataclass(frozen=True, slots=True)
class Measured:
    """Trace with latency, throughput and cache metrics."""

    run: Run
    metrics: TraceMetrics
    analysis: "CacheAnalysis | None" = None
    """Null: the trace has no block hashes."""
