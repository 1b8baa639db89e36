"""Latency and token metrics in Prometheus text format, built per scrape: no cost while serving."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from measure.histogram import HistogramCounts, cumulative, empty_counts

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the text format."""
Row = tuple[Sequence[str], float]
"""Label values, and the value of the metric."""


@dataclass(frozen=True, slots=True)
class _Scrape(Collector):
    metrics: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.metrics


def exposition(metrics: Iterable[Metric]) -> bytes:
    """Return the text of a scrape."""
    return generate_latest(_Scrape(metrics))


@dataclass(frozen=True, slots=True)
class Families:
    """Factory of metrics with a common name prefix."""

    prefix: str

    def counter(self, name: str, text: str, rows: Iterable[Row], labels: Sequence[str] = ()) -> Metric:
        family = CounterMetricFamily(self.prefix + name, text, labels=list(labels))
        for values, count in rows:
            family.add_metric(values, float(count))
        return family

    def gauge(self, name: str, text: str, rows: Iterable[Row], labels: Sequence[str] = ()) -> Metric:
        family = GaugeMetricFamily(self.prefix + name, text, labels=list(labels))
        for values, value in rows:
            family.add_metric(values, float(value))
        return family

    def histogram(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        rows: Iterable[tuple[Sequence[str], HistogramCounts]],
        labels: Sequence[str] = (),
    ) -> Metric:
        """Return a histogram with cumulative counts by bucket; counts without buckets mean no value."""
        family = HistogramMetricFamily(self.prefix + name, text, labels=list(labels))
        for values, counts in rows:
            filled = counts if counts.counts else empty_counts(bounds)
            family.add_metric(values, cumulative(bounds, filled), filled.total)
        return family
