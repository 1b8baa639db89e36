"""Latency and token statistics of samples, by the common quantile rule."""

import numpy as np

from measure.metrics.results import Statistics
from measure.quantiles import quantile_index
from tracefile.records.arrays import FloatArray

LEVELS = (0.50, 0.90, 0.95, 0.99)


def statistics_of(values: FloatArray) -> Statistics | None:
    """Return the statistics of latencies or token counts, without NaN; null: no value."""
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    indices = [quantile_index(level, len(values)) for level in LEVELS]
    mean = float(values.mean())
    values.partition(sorted({0, *indices, len(values) - 1}))  # a copy, by the mask above
    p50, p90, p95, p99 = (float(values[index]) for index in indices)
    return Statistics(
        n=len(values), mean=mean, min=float(values[0]), p50=p50, p90=p90, p95=p95, p99=p99, max=float(values[-1])
    )


def quantile_of(values: FloatArray, level: float) -> float | None:
    """Return a latency quantile, without NaN; null: no value."""
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    index = quantile_index(level, len(values))
    values.partition(index)  # a copy, by the mask above
    return float(values[index])


def statistic(sample: Statistics | None, name: str) -> float | None:
    """Return a statistic of a sample; null: no sample."""
    return None if sample is None else float(getattr(sample, name))
