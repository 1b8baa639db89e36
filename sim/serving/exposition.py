"""The engines' state under vLLM's Prometheus names, made when it is scraped, so that serving pays nothing for it."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from measure.histogram import HistogramCounts, cumulative
from sim.serving.engine.faults import Faults
from sim.serving.engine.realtime import LATENESS_S, SECONDS, RealTimeEngine

_LABELS = ("model_name", "engine")
_Read = Callable[[RealTimeEngine], float]
_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("num_requests_running", "Requests that hold blocks.", lambda engine: engine.num_running),
    ("num_requests_waiting", "Requests that wait to be scheduled.", lambda engine: engine.num_waiting),
    ("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all.", lambda engine: engine.kv_usage),
)
_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    (
        "prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        lambda engine: engine.scheduler.stats.query_tokens,
    ),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", lambda engine: engine.scheduler.stats.hit_tokens),
    (
        "prompt_tokens",
        "Prompt tokens of requests that got a first token.",
        lambda engine: engine.counters.prompt_tokens,
    ),
    ("prompt_tokens_cached", "Those from the prefix cache.", lambda engine: engine.counters.cached_prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda engine: engine.counters.generation_tokens),
    (
        "num_preemptions",
        "Requests that had to give their blocks back.",
        lambda engine: engine.counters.preemptions,
    ),
)
_HISTOGRAMS: tuple[tuple[str, str, Sequence[float], Callable[[RealTimeEngine], HistogramCounts]], ...] = (
    ("vllm:time_to_first_token_seconds", "Time to first token.", SECONDS, lambda engine: engine.counters.ttft_s),
    (
        "vllm:inter_token_latency_seconds",
        "Gap between a request's tokens.",
        SECONDS,
        lambda engine: engine.counters.itl_s,
    ),
    ("vllm:e2e_request_latency_seconds", "Arrival to last token.", SECONDS, lambda engine: engine.counters.e2e_s),
    (
        "kvtape_sim:lateness_seconds",
        "Delay of a step's first token against the model's time.",
        LATENESS_S,
        lambda engine: engine.counters.lateness_s,
    ),
)


class Exposition:
    """A collector over the engines; its metrics are those of vLLM 0.32 that mean something here, and our own."""

    def __init__(self, engines: Sequence[RealTimeEngine], model_name: str, faults: Faults) -> None:
        self._engines = [((model_name, str(place)), engine) for place, engine in enumerate(engines)]
        self._faults = faults
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        for _, engine in self._engines:
            engine.settle()
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield self._cache_config()
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=list(_LABELS))
            for labels, engine in self._engines:
                gauge.add_metric(labels, float(read(engine)))
            yield gauge
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=list(_LABELS))
            for labels, engine in self._engines:
                counter.add_metric(labels, float(read(engine)))
            yield counter
        yield self._ended()
        for name, text, bounds, read_counts in _HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=list(_LABELS))
            for labels, engine in self._engines:
                counts = read_counts(engine)
                family.add_metric(labels, cumulative(bounds, counts), counts.total)
            yield family
        yield self._injected()

    def _cache_config(self) -> Metric:
        names = ("block_size", "num_gpu_blocks", "enable_prefix_caching", "engine")
        family = GaugeMetricFamily("vllm:cache_config_info", "Settings of the KV cache.", labels=names)
        for (_, place), engine in self._engines:
            config = engine.scheduler.config
            facts = (config.block_size, config.num_gpu_blocks, config.enable_prefix_caching, place)
            family.add_metric([str(fact) for fact in facts], 1.0)
        return family

    def _ended(self) -> Metric:
        labels = [*_LABELS, "finished_reason"]
        ended = CounterMetricFamily("vllm:request_success", "Requests that ended.", labels=labels)
        for engine_labels, engine in self._engines:
            for reason, count in engine.counters.finished.items():
                ended.add_metric((*engine_labels, reason), float(count))
        return ended

    def _injected(self) -> Metric:
        family = CounterMetricFamily("kvtape_sim:faults", "Faults injected on purpose.", labels=["kind"])
        for kind, count in self._faults.injected.items():
            family.add_metric([kind], float(count))
        return family
