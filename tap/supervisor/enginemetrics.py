"""What engines say of their load while traffic is recorded: samples of ``/metrics`` in a file, on the trace's clock."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from engines.control import read_pages
from engines.facts import parse_metrics, read_gauges
from tracefile.records.encoding import encode_meta
from tracefile.records.schema import Meta
from wire.url import Origin


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


async def _sample(file: SampleFile, origin: Origin) -> EngineSample:
    (text,) = await read_pages(origin, ("/metrics",))
    at_ms = file.now_ms()
    if not text:
        return EngineSample(at_ms=at_ms, upstream=str(origin), error="no_answer")
    gauges = read_gauges(parse_metrics(text))
    return msgspec.convert({"at_ms": at_ms, "upstream": str(origin), **gauges}, EngineSample)


def _say(text: str) -> None:
    print(f"tap: {text}", file=sys.stderr, flush=True)
