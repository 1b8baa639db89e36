"""What can be learnt of the upstreams: whether they are there, their model, version and cache settings."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import msgspec

from engines.facts import Metric, describe_engine, first_model, parse_metrics
from tap.ipc.exchange import Dialect
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine
from wire.pool import ConnectError, ConnectionPool
from wire.url import Origin

REQUEST_TIMEOUT_S = 2.0
RETRY_S = 0.25
MAX_ANSWER_BYTES = 8 << 20

METRIC_PREFIXES: dict[str, Dialect] = {"vllm:": "vllm", "sglang:": "sglang", "llamacpp:": "llamacpp"}
"""Engines call their metrics after themselves."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an upstream told; a null engine, model or dialect: nothing of it."""

    engine: Engine | None = None
    model: str | None = None
    """The first model that it serves."""
    dialect: Dialect | None = None
    origin: Origin | None = None
    """Who told it, or would have."""


async def reach_upstreams(origins: Sequence[Origin], wait_s: float) -> list[Origin]:
    """Those that accept a connection, once any does, tried for ``wait_s``. Raises InputError if none does."""
    deadline = time.monotonic() + wait_s
    while True:
        failures = await asyncio.gather(*(_failure_to_reach(origin) for origin in origins))
        reached = [origin for origin, failure in zip(origins, failures, strict=True) if failure is None]
        if reached:
            return reached
        if time.monotonic() >= deadline:
            raise InputError(
                f"--upstream {origins[0]}: cannot be reached ({failures[0]}); expected a server that listens there, "
                "or --wait-s to wait for one"
            )
        await asyncio.sleep(RETRY_S)


async def learn_engine_facts(origin: Origin) -> EngineFacts:
    """Ask ``/version``, ``/metrics`` and ``/v1/models``; whatever does not answer in time is not learnt."""
    async with engine_client(origin) as client:
        version, metrics_text, models = await asyncio.gather(
            *(ask(client, path) for path in ("/version", "/metrics", "/v1/models"))
        )
    metrics = parse_metrics(metrics_text)
    engine = describe_engine(version, metrics, models)
    return EngineFacts(
        engine=None if engine == Engine() else engine,
        model=first_model(models),
        dialect=dialect_of(metrics),
        origin=origin,
    )


def dialect_of(metrics: dict[str, Metric]) -> Dialect | None:
    """Which engine the metrics are called after; null: none known."""
    for prefix, dialect in METRIC_PREFIXES.items():
        if any(name.startswith(prefix) for name in metrics):
            return dialect
    return None


def changed_engine(known: Engine | None, learnt: Engine | None) -> Engine | None:
    """The engine as it is now, if it is another than was known; null: it is the same, as far as it told this time.

    An answer that did not come is no change: what it would have said stays as it was.
    """
    if learnt is None:
        return None
    told = {name: value for name, value in msgspec.structs.asdict(learnt).items() if value not in (None, {})}
    now = msgspec.structs.replace(known or Engine(), **told)
    return None if now == known else now


def engine_client(origin: Origin) -> httpx.AsyncClient:
    """A client for the engine's own pages."""
    tls = origin.ssl_context() or False  # False: plain http, for which httpx would still load every authority
    return httpx.AsyncClient(base_url=str(origin), timeout=REQUEST_TIMEOUT_S, trust_env=False, verify=tls)


async def ask(client: httpx.AsyncClient, path: str) -> str:
    """A page's text; empty if it did not come in time, in full, and with status 200."""
    try:
        response = await client.get(path)
    except httpx.HTTPError:
        return ""
    return response.text if response.status_code == 200 and len(response.content) <= MAX_ANSWER_BYTES else ""


async def _failure_to_reach(origin: Origin) -> str | None:
    """Why it cannot be reached; null: it can."""
    pool = ConnectionPool(origin)
    try:
        (await pool.connect()).abort()
    except ConnectError as error:
        return error.kind
    return None
