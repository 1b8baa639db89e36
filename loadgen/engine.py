"""What the target says of itself, asked before and after a run over plain HTTP; never on the data plane."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from tracefile import Engine, InputError

CONTROL_TIMEOUT_S = 30.0
QUERIES_METRIC = "vllm:prefix_cache_queries"
HITS_METRIC = "vllm:prefix_cache_hits"
CONFIG_METRIC = "vllm:cache_config_info"

_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class PrefixCounters:
    """The engine's own count of prefix cache lookups since its start, in tokens."""

    queries: int
    hits: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What could be learnt; null: the engine did not say."""

    engine: Engine
    counters: PrefixCounters | None


class ControlClient:
    """Control calls to one target; a context manager."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.Client(timeout=CONTROL_TIMEOUT_S, trust_env=False)

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def resolve_model(self, model: str) -> str:
        """The model to name in requests: as given, or the first that ``/v1/models`` lists for ``auto``.

        Raises InputError if the target cannot be reached, or lists none.
        """
        try:
            response = self._client.get(f"{self.url}/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise InputError(f"--url: {self.url}: {type(error).__name__}; expected an engine that answers") from None
        if model != "auto":
            return model
        try:
            return str(response.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            raise InputError(
                f"--model: {self.url}/v1/models (HTTP {response.status_code}) names none; expected --model NAME"
            ) from None

    def facts(self) -> EngineFacts:
        """Version, cache configuration and prefix counters, as far as the target tells them."""
        version = self._version()
        samples = parse_metrics(self._text("/metrics") or "")
        return EngineFacts(_engine(version, samples.get(CONFIG_METRIC)), _counters(samples))

    def _version(self) -> str | None:
        try:
            version = self._client.get(f"{self.url}/version").raise_for_status().json()["version"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None
        return version if isinstance(version, str) else None

    def _text(self, path: str) -> str | None:
        try:
            return self._client.get(f"{self.url}{path}").raise_for_status().text
        except httpx.HTTPError:
            return None

    def post(self, path: str, body: bytes = b"") -> httpx.Response:
        """One POST; raises InputError if the target cannot be reached."""
        try:
            return self._client.post(f"{self.url}{path}", content=body, headers={"Content-Type": "application/json"})
        except httpx.HTTPError as error:
            raise InputError(f"--url: {self.url}{path}: {type(error).__name__}; expected an answer") from None


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's samples: values summed over engines, labels of the first."""

    value: float
    labels: Mapping[str, str]


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
        metrics[name] = Metric(value + (before.value if before else 0.0), labels)
    return metrics


def _counters(metrics: Mapping[str, Metric]) -> PrefixCounters | None:
    queries, hits = metrics.get(QUERIES_METRIC), metrics.get(HITS_METRIC)
    return None if queries is None or hits is None else PrefixCounters(int(queries.value), int(hits.value))


def _engine(version: str | None, config: Metric | None) -> Engine:
    labels = config.labels if config else {}
    caching = labels.get("enable_prefix_caching")
    return Engine(
        name="vllm" if config else None,
        version=version,
        block_size=_positive(labels.get("block_size")),
        num_gpu_blocks=_positive(labels.get("num_gpu_blocks")),
        enable_prefix_caching=None if caching is None else caching == "True",
    )


def _positive(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and int(text) > 0 else None
