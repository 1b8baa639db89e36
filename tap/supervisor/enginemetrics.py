"""What engines say of their load while traffic is recorded: samples of ``/metrics`` in a file, on the trace's clock."""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from engines.facts import Metric, parse_metrics
from tap.supervisor.enginefacts import ask, engine_client
from tracefile.records.encoding import encode_meta
from tracefile.records.schema import Meta
from wire.url import Origin

GAUGES: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"),
    "kv_usage": (
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
        "llamacpp:kv_cache_usage_ratio",
    ),
    "prefix_queries": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries", "sglang:prompt_tokens"),
    "prefix_hits": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits", "sglang:cached_tokens"),
    "preemptions": ("vllm:num_preemptions",),
}
"""Each value's name here, and by what names engines report it, newest first."""
SHARES = frozenset({"kv_usage"})
"""Of several engines behind one address the mean, where all else adds up."""


class EngineSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One upstream's load at one moment. Null: it does not report that."""

    at_ms: float
    """When the answer came, on the trace's clock."""
    upstream: str
    error: str | None = None
    """no_answer: it gave none in time. Null: it did."""
    running: float | None = None
    """Requests being computed."""
    waiting: float | None = None
    """Requests that wait for their turn."""
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    prefix_queries: float | None = None
    """Prompt tokens looked up in the prefix cache since the engine's start."""
    prefix_hits: float | None = None
    """Those of them that were found."""
    preemptions: float | None = None
    """Since the engine's start."""


@dataclass(frozen=True, slots=True)
class SampleFile:
    """The file beside the trace: a header like the trace's, then a sample a line; a run that resumes adds its own."""

    trace: str
    meta: Meta
    epoch_ns: int
    """The monotonic clock at the trace's t = 0."""
    resume: bool

    @property
    def path(self) -> str:
        """Where it is."""
        return f"{self.trace}.engine.jsonl"

    def open(self) -> BinaryIO:
        """The file, with its header. Raises OSError."""
        file = open(self.path, "ab" if self.resume else "wb", buffering=0)  # noqa: SIM115  the caller's to close
        file.write(encode_meta(self.meta))
        return file

    def now_ms(self) -> float:
        """The trace's clock."""
        return (time.perf_counter_ns() - self.epoch_ns) / 1e6


async def sample_engines(file: SampleFile, origins: Callable[[], Sequence[Origin]], every_s: float) -> None:
    """Sample every upstream each ``every_s``, for ever; what cannot be written is lost, and said once."""
    try:
        out = file.open()
    except OSError as error:
        _say(f"{file.path}: cannot be written ({error.strerror or error}); the engine is not sampled")
        return
    with out:
        failing = False
        due = time.monotonic()
        while True:
            samples = await asyncio.gather(*(_sample(file, origin) for origin in origins()))
            try:
                out.write(b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples))
                failing = False
            except OSError as error:
                if not failing:
                    _say(f"{file.path}: cannot be written ({error.strerror or error}); samples of the engine are lost")
                failing = True
            due = max(due + every_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())


def read_gauges(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The values that are reported, by their names here."""
    found = {}
    for name, reported in GAUGES.items():
        for metric in reported:
            if metric in metrics:
                value, samples = metrics[metric].value, metrics[metric].samples
                found[name] = value / samples if name in SHARES else value
                break
    return found


async def _sample(file: SampleFile, origin: Origin) -> EngineSample:
    async with engine_client(origin) as client:
        text = await ask(client, "/metrics")
    at_ms = file.now_ms()
    if not text:
        return EngineSample(at_ms=at_ms, upstream=str(origin), error="no_answer")
    found = read_gauges(parse_metrics(text))
    return EngineSample(
        at_ms=at_ms,
        upstream=str(origin),
        running=found.get("running"),
        waiting=found.get("waiting"),
        kv_usage=found.get("kv_usage"),
        prefix_queries=found.get("prefix_queries"),
        prefix_hits=found.get("prefix_hits"),
        preemptions=found.get("preemptions"),
    )


def _say(text: str) -> None:
    print(f"tap: {text}", file=sys.stderr, flush=True)
