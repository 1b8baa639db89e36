"""Metrics in Prometheus's text form, made when they are scraped: serving pays nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from measure.histogram import HistogramCounts, cumulative, empty_counts

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the text form."""
Row = tuple[Sequence[str], float]
"""Values of the labels, and the metric's."""


@dataclass(frozen=True, slots=True)
class _Scrape(Collector):
    metrics: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.metrics


def exposition(metrics: Iterable[Metric]) -> bytes:
    """Return the text of one scrape."""
    return generate_latest(_Scrape(metrics))


@dataclass(frozen=True, slots=True)
class Families:
    """Maker of metrics whose names begin alike."""

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
        """Return cumulative counts by bucket; counts without buckets are those of no value."""
        family = HistogramMetricFamily(self.prefix + name, text, labels=list(labels))
        for values, counts in rows:
            whole = counts if counts.counts else empty_counts(bounds)
            family.add_metric(values, cumulative(bounds, whole), whole.total)
        return family
