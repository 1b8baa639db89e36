"""Facts of an engine (version, block size, KV cache, load) from ``/version``, ``/metrics`` and ``/v1/models``."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from engines.detection import DIALECTS, dialect_of_metrics, dialect_of_owner
from engines.dialect import DialectName, decoded, reported_count, reported_text
from engines.vllm import EMBEDDED_NAME
from tracefile.hashing.blockhash import DEFAULT_BLOCK_SIZE
from tracefile.records.schema import Engine
from wire.url import Origin

CONFIG_METRIC = "vllm:cache_config_info"

PAGES = ("/version", "/metrics", "/v1/models")
"""Pages of ``read_facts``, in the order of its arguments."""
MEAN_GAUGES = frozenset({"kv_usage"})
"""Gauges that are averaged over the engines behind one address; other gauges are summed."""

MIN_BLOCK_SIZE = 8
"""Smallest block size adopted from an engine: with the key, a hash of fewer tokens can be guessed."""
MAX_METRICS = 10_000
"""Limit of metric names of a page; engines have some hundreds."""

_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S{1,40})", re.MULTILINE)
# Possessive, and anchored at a word's start: a long word without a value costs linear time.
_LABEL = re.compile(r'(?<!\w)(\w++)="((?:[^"\\]|\\.)*+)"')


@dataclass(frozen=True, slots=True)
class Metric:
    """Samples of a metric: values summed over engines; labels of the first sample of ``CONFIG_METRIC``."""

    value: float
    labels: Mapping[str, str]
    samples: int = 1


@dataclass(frozen=True, slots=True)
class PrefixCounters:
    """Prefix cache lookups since the engine's start, in tokens."""

    queries: int
    hits: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of one engine: KV cache settings, model, load, prefix cache counters; None: not reported."""

    engine: Engine = field(default_factory=Engine)
    model: str | None = None
    """First served model."""
    dialect: DialectName | None = None
    """Dialect by the metric names, else by the model's ``owned_by``."""
    gauges: Mapping[str, float] = field(default_factory=dict)
    """Load at the time of the read (``Dialect.gauges``)."""
    counters: PrefixCounters | None = None
    origin: Origin | None = None
    """Server of the pages. None: known to the caller."""
    problem: str | None = None
    """Reason for a page that could not be read, for the user. None: all pages were read, or are absent."""

    @property
    def hash_block_size(self) -> int:
        """Block size for hashes: the engine's if smaller than the default but not guessable, else the default."""
        size = self.engine.block_size
        return size if size is not None and MIN_BLOCK_SIZE <= size < DEFAULT_BLOCK_SIZE else DEFAULT_BLOCK_SIZE

    def is_finer(self, block_size: int) -> bool:
        """Return whether the engine's blocks are smaller, so that prefix hits can end within blocks of this size."""
        return self.engine.block_size is not None and self.engine.block_size < block_size

    @property
    def reported_engine(self) -> Engine | None:
        """``engine``, or None if no setting was reported."""
        return None if self.engine == Engine() else self.engine


def parse_metrics(text: str) -> dict[str, Metric]:
    """Return Prometheus metrics by name, without ``_total``; invalid lines are skipped."""
    metrics: dict[str, Metric] = {}
    for sample in _SAMPLE.finditer(text):
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        name = sample["name"].removesuffix("_total")
        before = metrics.get(name)
        if not math.isfinite(value) or (before is None and len(metrics) == MAX_METRICS):
            continue
        if before is None:
            labels = dict(_LABEL.findall(sample["labels"] or "")) if name == CONFIG_METRIC else {}
            metrics[name] = Metric(value, labels)
        else:
            metrics[name] = Metric(before.value + value, before.labels, before.samples + 1)
    return metrics


def prefix_counters(metrics: Mapping[str, Metric]) -> PrefixCounters | None:
    """Return the prefix cache counters, in tokens; None: not reported."""
    gauges = read_gauges(metrics)
    queries, hits = gauges.get("prefix_queries"), gauges.get("prefix_hits")
    return None if queries is None or hits is None else PrefixCounters(int(queries), int(hits))


def read_facts(version_text: str, metrics_text: str, models_text: str) -> EngineFacts:
    """Return the facts in the texts of ``PAGES``; empty text: the page gave no response."""
    metrics = parse_metrics(metrics_text)
    dialect = dialect_of_metrics(metrics) or dialect_of_owner(_field(models_text, "data", "owned_by"))
    return EngineFacts(
        engine=describe_engine(version_text, metrics, models_text),
        model=first_model(models_text),
        dialect=None if dialect is None else dialect.name,
        counters=prefix_counters(metrics),
        gauges=read_gauges(metrics),
    )


def settings_pages(facts: EngineFacts) -> Sequence[str]:
    """Return the further pages that may have the engine's KV cache settings; newest first."""
    dialect = None if facts.dialect is None else DIALECTS[facts.dialect]
    return () if dialect is None or dialect.read_settings is None else tuple(dialect.pages)


def add_settings(facts: EngineFacts, settings_text: str) -> EngineFacts:
    """Return the facts, completed by the settings page; facts that are already reported have precedence."""
    dialect = None if facts.dialect is None else DIALECTS[facts.dialect]
    settings = decoded(settings_text)
    if dialect is None or dialect.read_settings is None or not isinstance(settings, dict):
        return facts
    settings_engine = dialect.read_settings(settings)
    reported = {name: value for name, value in msgspec.structs.asdict(facts.engine).items() if value not in (None, {})}
    return replace(facts, engine=msgspec.structs.replace(settings_engine, **reported))


def read_gauges(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the reported load by gauge name (``Dialect.gauges``): running, waiting, KV cache usage, prefix hits."""
    gauges: dict[str, float] = {}
    for dialect in DIALECTS.values():
        for name, formulas in dialect.gauges.items():
            names = next((names for text in formulas if metrics.keys() >= {*(names := text.split(" + "))}), ())
            if names:
                samples = metrics[names[0]].samples if name in MEAN_GAUGES else 1
                gauges.setdefault(name, sum(metrics[counter].value for counter in names) / samples)
    return gauges


def describe_engine(version_text: str, metrics: Mapping[str, Metric], models_text: str) -> Engine:
    """Return version, block size and KV cache settings in the texts; empty text: the page gave no response."""
    labels = metrics[CONFIG_METRIC].labels if CONFIG_METRIC in metrics else {}
    version = _field(version_text, "version")
    embedded = _field(version_text, "engine") == EMBEDDED_NAME
    return Engine(
        name=EMBEDDED_NAME if embedded else "vllm" if any(name.startswith("vllm:") for name in metrics) else None,
        version=reported_text(version),
        block_size=reported_count(labels.get("block_size")),
        num_gpu_blocks=reported_count(labels.get("num_gpu_blocks")),
        max_model_len=reported_count(_field(models_text, "data", "max_model_len")),
        enable_prefix_caching={"True": True, "False": False}.get(labels.get("enable_prefix_caching", "")),
        extra={} if (window := reported_count(labels.get("sliding_window"))) is None else {"sliding_window": window},
    )


def first_model(models_text: str) -> str | None:
    """Return the first model in the text of ``/v1/models``; None: no model."""
    return reported_text(_field(models_text, "data", "id"))


def _field(text: str, *path: str) -> Any:
    """Return the value at ``path`` in a JSON text, descending into the first element of lists; None: absent."""
    value = decoded(text)
    for name in path:
        if isinstance(value, list):
            value = value[0] if value else None
        value = value.get(name) if isinstance(value, dict) else None
    return value
