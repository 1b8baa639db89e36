"""The engines behind the upstreams: reached at the start, then watched for another version or cache configuration."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from engines.control import learn_engine_facts, read_pages
from engines.facts import parse_metrics, read_gauges
from tap.supervisor.restarting import say
from tracefile.records.encoding import encode_meta
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine, Meta
from wire.pool import ConnectError, ConnectionPool
from wire.url import Origin

POLL_S = 30.0
RETRY_S = 0.25


async def reach_upstreams(origins: Sequence[Origin], wait_s: float) -> list[Origin]:
    """Return the upstreams that accept a connection, once any does; raises InputError after ``wait_s`` without one."""
    deadline = time.monotonic() + wait_s
    while True:
        failures = await asyncio.gather(*(_failure_to_reach(origin) for origin in origins))
        reached = [origin for origin, failure in zip(origins, failures, strict=True) if failure is None]
        if reached:
            return reached
        if time.monotonic() >= deadline:
            raise InputError(
                f"--upstream {origins[0]}: cannot be reached ({failures[0]}); expected a server that listens there, "
                "or --wait to wait for one"
            )
        await asyncio.sleep(RETRY_S)


async def watch_engines(
    origins: Callable[[], Sequence[Origin]],
    known: Engine | None,
    changed: Callable[[Engine], None],
    every_s: float = POLL_S,
) -> None:
    """Ask all engines every ``every_s``, for ever; ``changed`` gets the new engine of the header.

    The header names one engine, so the first upstream that answers stands for all. An upstream that differs from it is
    reported on stderr, once.
    """
    others: dict[Origin, Engine] = {}
    while True:
        await asyncio.sleep(every_s)
        asked = tuple(origins())
        answers = await asyncio.gather(*(learn_engine_facts(origin) for origin in asked))
        told = [
            (origin, engine) for origin, facts in zip(asked, answers, strict=True) if (engine := facts.known_engine)
        ]
        if not told:
            continue
        (_, first), *rest = told
        now = changed_engine(known, first)
        if now is not None:
            known = now
            changed(now)
        for origin, engine in rest:
            if engine not in (first, others.get(origin)):
                others[origin] = engine
                say(f"upstream {origin} is another engine than {told[0][0]}")


def changed_engine(known: Engine | None, learnt: Engine | None) -> Engine | None:
    """Return the engine as it is now if it differs from ``known``; null: the same, as far as it told this time.

    A page without an answer is no change: the fields it would have told stay.
    """
    if learnt is None:
        return None
    told = {name: value for name, value in msgspec.structs.asdict(learnt).items() if value not in (None, {})}
    now = msgspec.structs.replace(known or Engine(), **told)
    return None if now == known else now


async def _failure_to_reach(origin: Origin) -> str | None:
    pool = ConnectionPool(origin)
    try:
        (await pool.connect()).abort()
    except ConnectError as error:
        return error.kind
    return None


class EngineSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Load of an upstream at one moment. Null: not reported."""

    at_ms: float
    """Time of the response, on the trace's clock."""
    upstream: str
    error: str | None = None
    """no_answer: none in time. Null: no error."""
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    prefix_queries: float | None = None
    """Prompt tokens looked up in the prefix cache since the engine's start."""
    prefix_hits: float | None = None
    """Prompt tokens found in it."""
    preemptions: float | None = None


@dataclass(frozen=True, slots=True)
class SampleFile:
    """File beside the trace: a header like the trace's, then a sample a line; a resumed run appends its own."""

    trace: str
    meta: Meta
    epoch_ns: int
    """Monotonic clock at the trace's t = 0."""
    resume: bool

    @property
    def path(self) -> str:
        return f"{self.trace}.engine.jsonl"

    def open(self) -> BinaryIO:
        file = open(self.path, "ab" if self.resume else "wb", buffering=0)  # noqa: SIM115  the caller's to close
        file.write(encode_meta(self.meta))
        return file

    def now_ms(self) -> float:
        return (time.perf_counter_ns() - self.epoch_ns) / 1e6


async def sample_engines(file: SampleFile, origins: Callable[[], Sequence[Origin]], every_s: float) -> None:
    """Sample all upstreams every ``every_s``, for ever; samples that cannot be written are lost, with one message."""
    try:
        out = file.open()
    except OSError as error:
        say(f"{file.path}: cannot be written ({error.strerror or error}); the engine is not sampled")
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
                    say(f"{file.path}: cannot be written ({error.strerror or error}); samples of the engine are lost")
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
