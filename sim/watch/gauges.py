"""Prometheus gauges of a watch's last judgement, served by prometheus_client."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from measure.exposition import Families
from sim.watch.modelwatch import Bounds, Judgement
from tracefile.records.errors import InputError

_FAMILIES = Families("kvtape_watch_")


class Gauges(Collector):
    """Collects nothing until there is a judgement."""

    def __init__(self) -> None:
        self.judgement: Judgement | None = None

    def collect(self) -> Iterator[Metric]:
        if (one := self.judgement) is None:
            return
        low, high = one.allowed
        gauge = _FAMILIES.gauge
        yield gauge("drifted", "1: the pace has left the model's drift.", [((), one.drifted)])
        yield gauge("pace", "Steps' time over the model's.", _rows(one.pace), ["bound"])
        yield gauge("allowed_pace", "The model's range.", [(("low",), low), (("high",), high)], ["bound"])
        yield gauge("requests", "Judged requests of the last ten minutes.", [((), one.requests)])
        labels = ["quantile", "bound"]
        seen = [((row.level, "seen"), row.seen / 1e3) for row in one.ttft if row.seen is not None]
        made = [((row.level, *bound), value / 1e3) for row in one.ttft for bound, value in _rows(row.predicted)]
        yield gauge("ttft_seconds", "TTFT seen, and predicted with its interval.", seen + made, labels)


def _rows(bounds: Bounds | None) -> list[tuple[tuple[str], float]]:
    named = [] if bounds is None else [("middle", bounds.middle), ("low", bounds.low), ("high", bounds.high)]
    return [((name,), value) for name, value in named if value is not None]


def serve(address: str) -> Gauges:
    """Serve gauges at HOST:PORT, on a thread of the library. Raises InputError for an address that cannot be used."""
    host, _, port = address.rpartition(":")
    gauges, registry = Gauges(), CollectorRegistry()
    registry.register(gauges)
    try:
        start_http_server(int(port), host or "0.0.0.0", registry)
    except (ValueError, OverflowError, OSError) as error:
        raise InputError(f"--metrics {address}: {error}; expected HOST:PORT, free on this machine") from None
    return gauges
