"""Statistics of samples by the one quantile rule."""

import numpy as np

from measure.metrics.results import Statistics
from measure.quantiles import quantile_place
from tracefile.records.arrays import FloatArray

LEVELS = (0.50, 0.90, 0.95, 0.99)


def statistics_of(values: FloatArray) -> Statistics | None:
    """Return the statistics of the values that are known; null: none is."""
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    places = [quantile_place(level, len(values)) for level in LEVELS]
    mean = float(values.mean())
    values.partition(sorted({0, *places, len(values) - 1}))  # a copy, by the mask above
    p50, p90, p95, p99 = (float(values[place]) for place in places)
    return Statistics(
        n=len(values), mean=mean, min=float(values[0]), p50=p50, p90=p90, p95=p95, p99=p99, max=float(values[-1])
    )


def quantile_of(values: FloatArray, level: float) -> float | None:
    """Return one quantile of the values that are known; null: none is."""
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    place = quantile_place(level, len(values))
    values.partition(place)  # a copy, by the mask above
    return float(values[place])


def statistic(sample: Statistics | None, name: str) -> float | None:
    """Return one number of a sample; null: there is no sample."""
    return None if sample is None else float(getattr(sample, name))
