"""What an engine says of itself, read from the texts of ``/version``, ``/metrics`` and ``/v1/models``.

Who asks is not our matter. Text that is missing or not understood teaches nothing, and is no error: a proxy in between
may answer for the engine.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tracefile.records.schema import Engine

QUERIES_METRIC = "vllm:prefix_cache_queries"
HITS_METRIC = "vllm:prefix_cache_hits"
CONFIG_METRIC = "vllm:cache_config_info"

_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's samples: values summed over engines, labels of the first."""

    value: float
    labels: Mapping[str, str]
    samples: int = 1
    """How many were added up."""


@dataclass(frozen=True, slots=True)
class PrefixCounters:
    """The engine's own count of prefix cache lookups since its start, in tokens."""

    queries: int
    hits: int


def parse_metrics(text: str) -> dict[str, Metric]:
    """Prometheus text as one value a name, ``_total`` left off counters; lines it cannot read are skipped."""
    metrics: dict[str, Metric] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        name = found["name"].removesuffix("_total")
        before = metrics.get(name)
        labels = dict(_LABEL.findall(found["labels"] or "")) if before is None else before.labels
        metrics[name] = (
            Metric(value, labels) if before is None else Metric(before.value + value, labels, before.samples + 1)
        )
    return metrics


def prefix_counters(metrics: Mapping[str, Metric]) -> PrefixCounters | None:
    """The prefix cache's counters; null: not reported."""
    queries, hits = metrics.get(QUERIES_METRIC), metrics.get(HITS_METRIC)
    return None if queries is None or hits is None else PrefixCounters(int(queries.value), int(hits.value))


def describe_engine(version_text: str, metrics: Mapping[str, Metric], models_text: str) -> Engine:
    """The engine as far as the three answers tell; an empty text is an answer that did not come."""
    labels = metrics[CONFIG_METRIC].labels if CONFIG_METRIC in metrics else {}
    version = _field(version_text, "version")
    return Engine(
        name="vllm" if any(name.startswith("vllm:") for name in metrics) else None,
        version=version if isinstance(version, str) else None,
        block_size=_positive(labels.get("block_size")),
        num_gpu_blocks=_positive(labels.get("num_gpu_blocks")),
        max_model_len=_positive(_field(models_text, "data", "max_model_len")),
        enable_prefix_caching={"True": True, "False": False}.get(labels.get("enable_prefix_caching", "")),
        extra={} if (window := _positive(labels.get("sliding_window"))) is None else {"sliding_window": window},
    )


def first_model(models_text: str) -> str | None:
    """The first model that ``/v1/models`` names; null: none."""
    model = _field(models_text, "data", "id")
    return model if isinstance(model, str) else None


def _field(text: str, *path: str) -> Any:
    """The value at ``path`` in a JSON text; of a list, its first element's. Null where there is none."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    for name in path:
        if isinstance(value, list):
            value = value[0] if value else None
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _positive(value: object) -> int | None:
    if not isinstance(value, int | str) or isinstance(value, bool) or not str(value).isdecimal():
        return None
    return int(value) or None
