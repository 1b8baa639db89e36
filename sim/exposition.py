"""The engine's state under vLLM's Prometheus names, made when it is scraped, so that serving pays nothing for it."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from sim.histogram import Histogram
from sim.realtime import RealTimeEngine

_LABELS = ("model_name", "engine")


class Exposition:
    """A collector over one engine; its metrics are those of vLLM 0.32 that mean something here."""

    def __init__(self, engine: RealTimeEngine, model_name: str) -> None:
        self._engine = engine
        self._labels = (model_name, "0")
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """The answer to a scrape."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every metric, as it is now."""
        yield self._cache_config()
        yield from self._gauges()
        yield from self._counters()
        counters = self._engine.counters
        yield self._histogram("time_to_first_token_seconds", "Time to first token.", counters.ttft_s)
        yield self._histogram("inter_token_latency_seconds", "Gap between a request's tokens.", counters.itl_s)
        yield self._histogram("e2e_request_latency_seconds", "Arrival to last token.", counters.e2e_s)

    def _cache_config(self) -> Metric:
        config = self._engine.scheduler.config
        facts = {
            "block_size": config.block_size,
            "num_gpu_blocks": config.num_gpu_blocks,
            "enable_prefix_caching": config.enable_prefix_caching,
            "engine": "0",
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "Settings of the KV cache.", labels=list(facts))
        family.add_metric([str(value) for value in facts.values()], 1.0)
        return family

    def _gauges(self) -> Iterator[Metric]:
        engine = self._engine
        for name, value, text in (
            ("num_requests_running", engine.num_running, "Requests that hold blocks."),
            ("num_requests_waiting", engine.num_waiting, "Requests that wait to be scheduled."),
            ("kv_cache_usage_perc", engine.kv_usage, "Share of the KV cache in use; 1 is all."),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=list(_LABELS))
            gauge.add_metric(self._labels, float(value))
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        counters, stats = self._engine.counters, self._engine.scheduler.stats
        for name, value, text in (
            ("prefix_cache_queries", stats.query_tokens, "Tokens looked up in the prefix cache."),
            ("prefix_cache_hits", stats.hit_tokens, "Tokens found in the prefix cache."),
            ("prompt_tokens", counters.prompt_tokens, "Prompt tokens of requests that got a first token."),
            ("prompt_tokens_cached", counters.cached_prompt_tokens, "Those taken from the prefix cache."),
            ("generation_tokens", counters.generation_tokens, "Tokens generated."),
            ("num_preemptions", counters.preemptions, "Requests that had to give their blocks back."),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=list(_LABELS))
            counter.add_metric(self._labels, float(value))
            yield counter
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests that ended.", labels=[*_LABELS, "finished_reason"]
        )
        for reason, count in counters.finished.items():
            ended.add_metric((*self._labels, reason), float(count))
        yield ended

    def _histogram(self, name: str, text: str, values: Histogram) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=list(_LABELS))
        family.add_metric(self._labels, values.cumulative(), values.total)
        return family
