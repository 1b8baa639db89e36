"""What can be learnt of the upstream before traffic: whether it is there, its model, version and cache settings."""

import asyncio
import time
from dataclasses import dataclass

import httpx

from tracefile.enginefacts import describe_engine, first_model, parse_metrics
from tracefile.errors import InputError
from tracefile.schema import Engine
from wire.connection import ServerConnection
from wire.pool import ConnectError, ConnectionPool
from wire.url import Origin

REQUEST_TIMEOUT_S = 2.0
RETRY_S = 0.25
MAX_METRICS_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the upstream told; a null engine or model: nothing of it."""

    engine: Engine | None = None
    model: str | None = None
    """The first model that it serves."""


async def reach_upstream(pool: ConnectionPool, origin: Origin, wait_s: float) -> ServerConnection:
    """An open connection to the upstream, tried for ``wait_s``. Raises InputError if there is none."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return await pool.connect()
        except ConnectError as error:
            if time.monotonic() >= deadline:
                raise InputError(
                    f"--upstream {origin}: cannot be reached ({error.kind}); expected a server that listens there, "
                    "or --wait-s to wait for one"
                ) from None
        await asyncio.sleep(RETRY_S)


async def learn_engine_facts(origin: Origin) -> EngineFacts:
    """Ask ``/version``, ``/metrics`` and ``/v1/models``; whatever does not answer in time is not learnt."""
    tls = origin.ssl_context() or False  # False: plain http, for which httpx would still load every authority
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False, verify=tls) as client:
        version, metrics, models = await asyncio.gather(
            *(_get(client, f"{origin}{path}") for path in ("/version", "/metrics", "/v1/models"))
        )
    engine = describe_engine(version, parse_metrics(metrics), models)
    return EngineFacts(engine=None if engine == Engine() else engine, model=first_model(models))


async def _get(client: httpx.AsyncClient, url: str) -> str:
    try:
        response = await client.get(url)
    except httpx.HTTPError:
        return ""
    return response.text if response.status_code == 200 and len(response.content) <= MAX_METRICS_BYTES else ""
