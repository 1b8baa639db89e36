"""Facts of an engine from ``/version``, ``/metrics`` and ``/v1/models``; a text that is not understood is no error."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from engines.detection import DIALECTS, dialect_of_metrics, dialect_of_owner
from engines.dialect import DialectName, decoded, told_count, told_text
from engines.vllm import EMBEDDED_NAME
from tracefile.hashing.blockhash import DEFAULT_BLOCK_SIZE
from tracefile.records.schema import Engine
from wire.url import Origin

CONFIG_METRIC = "vllm:cache_config_info"

PAGES = ("/version", "/metrics", "/v1/models")
"""Pages whose texts ``read_facts`` takes, in this order."""
MEAN_GAUGES = frozenset({"kv_usage"})
"""Gauges averaged over the engines behind one address; all others are summed."""

MIN_BLOCK_SIZE = 8
"""Least block size of an engine that hashes take over: with the key, a hash of fewer tokens is guessed at once."""
MAX_METRICS = 10_000
"""Names kept of a page; engines have some hundreds."""

_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S{1,40})", re.MULTILINE)
# Possessive and at a word's start only: a long word without a value costs its length, not its square.
_LABEL = re.compile(r'(?<!\w)(\w++)="((?:[^"\\]|\\.)*+)"')


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's samples: values summed over engines; labels of the first, for ``CONFIG_METRIC`` alone."""

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
    """Everything learnt of one engine; null: not told."""

    engine: Engine = field(default_factory=Engine)
    model: str | None = None
    """The first model that it serves."""
    dialect: DialectName | None = None
    """The engine by its metrics' names, else by the owner of its model."""
    gauges: Mapping[str, float] = field(default_factory=dict)
    """Its load as they were read (``Dialect.gauges``)."""
    counters: PrefixCounters | None = None
    origin: Origin | None = None
    """Server that was asked. Null: known to the caller."""
    problem: str | None = None
    """Reason why a page could not be read, for the user. Null: all came, or are not there."""

    @property
    def hash_block_size(self) -> int:
        """Block size for hashes: the default, or the engine's if it is smaller but no guessable few tokens."""
        told = self.engine.block_size
        return told if told is not None and MIN_BLOCK_SIZE <= told < DEFAULT_BLOCK_SIZE else DEFAULT_BLOCK_SIZE

    def is_finer(self, block_size: int) -> bool:
        """Return whether the engine's prefix hits end within blocks of this size."""
        return self.engine.block_size is not None and self.engine.block_size < block_size

    @property
    def known_engine(self) -> Engine | None:
        """``engine``; null if nothing of it was told."""
        return None if self.engine == Engine() else self.engine


def parse_metrics(text: str) -> dict[str, Metric]:
    """Return one value a metric name, without ``_total``; unreadable lines are skipped."""
    metrics: dict[str, Metric] = {}
    for found in _SAMPLE.finditer(text):
        try:
            value = float(found["value"])
        except ValueError:
            continue
        name = found["name"].removesuffix("_total")
        before = metrics.get(name)
        if not math.isfinite(value) or (before is None and len(metrics) == MAX_METRICS):
            continue
        if before is None:
            labels = dict(_LABEL.findall(found["labels"] or "")) if name == CONFIG_METRIC else {}
            metrics[name] = Metric(value, labels)
        else:
            metrics[name] = Metric(before.value + value, before.labels, before.samples + 1)
    return metrics


def prefix_counters(metrics: Mapping[str, Metric]) -> PrefixCounters | None:
    """Return the prefix cache's counters; null: not reported."""
    gauges = read_gauges(metrics)
    queries, hits = gauges.get("prefix_queries"), gauges.get("prefix_hits")
    return None if queries is None or hits is None else PrefixCounters(int(queries), int(hits))


def read_facts(version_text: str, metrics_text: str, models_text: str) -> EngineFacts:
    """Return the facts in the texts of ``PAGES``; an empty text is a page without an answer."""
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
    """Return the pages, beside ``PAGES``, of which one may tell the engine's settings; the newest first."""
    dialect = None if facts.dialect is None else DIALECTS[facts.dialect]
    return () if dialect is None or dialect.read_settings is None else tuple(dialect.pages)


def add_settings(facts: EngineFacts, settings_text: str) -> EngineFacts:
    """Return the facts with those in the text of a settings page; what was known stays."""
    dialect = None if facts.dialect is None else DIALECTS[facts.dialect]
    settings = decoded(settings_text)
    if dialect is None or dialect.read_settings is None or not isinstance(settings, dict):
        return facts
    told = dialect.read_settings(settings)
    known = {name: value for name, value in msgspec.structs.asdict(facts.engine).items() if value not in (None, {})}
    return replace(facts, engine=msgspec.structs.replace(told, **known))


def read_gauges(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the engine's load by gauge name (``Dialect.gauges``), as far as it is reported."""
    found: dict[str, float] = {}
    for dialect in DIALECTS.values():
        for name, reported in dialect.gauges.items():
            parts = next((parts for one in reported if metrics.keys() >= {*(parts := one.split(" + "))}), ())
            if parts:
                samples = metrics[parts[0]].samples if name in MEAN_GAUGES else 1
                found.setdefault(name, sum(metrics[part].value for part in parts) / samples)
    return found


def describe_engine(version_text: str, metrics: Mapping[str, Metric], models_text: str) -> Engine:
    """Return the engine as far as the texts tell; an empty text is a page without an answer."""
    labels = metrics[CONFIG_METRIC].labels if CONFIG_METRIC in metrics else {}
    version = _field(version_text, "version")
    embedded = _field(version_text, "engine") == EMBEDDED_NAME
    return Engine(
        name=EMBEDDED_NAME if embedded else "vllm" if any(name.startswith("vllm:") for name in metrics) else None,
        version=told_text(version),
        block_size=told_count(labels.get("block_size")),
        num_gpu_blocks=told_count(labels.get("num_gpu_blocks")),
        max_model_len=told_count(_field(models_text, "data", "max_model_len")),
        enable_prefix_caching={"True": True, "False": False}.get(labels.get("enable_prefix_caching", "")),
        extra={} if (window := told_count(labels.get("sliding_window"))) is None else {"sliding_window": window},
    )


def first_model(models_text: str) -> str | None:
    """Return the first model in the text of ``/v1/models``; null: none."""
    return told_text(_field(models_text, "data", "id"))


def _field(text: str, *path: str) -> Any:
    """Return the value at ``path`` in a JSON text, of a list its first element's; null where there is none."""
    value = decoded(text)
    for name in path:
        if isinstance(value, list):
            value = value[0] if value else None
        value = value.get(name) if isinstance(value, dict) else None
    return value
