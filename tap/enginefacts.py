"""What can be learnt of the upstream before traffic: whether it is there, its model, version and cache settings."""

import asyncio
import re
import time
from dataclasses import dataclass

import httpx
import msgspec

from tracefile.errors import InputError
from tracefile.schema import Engine
from wire.connection import ServerConnection
from wire.pool import ConnectError, ConnectionPool
from wire.url import Origin

REQUEST_TIMEOUT_S = 2.0
RETRY_S = 0.25
MAX_METRICS_BYTES = 8 << 20

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_CACHE_CONFIG = "vllm:cache_config_info{"


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
    facts = cache_config(metrics)
    number = _field(version, "version")
    model = _field(models, "data", "id")
    engine = Engine(
        name="vllm" if "vllm:" in metrics else None,
        version=number,
        block_size=_integer(facts.get("block_size")),
        num_gpu_blocks=_integer(facts.get("num_gpu_blocks")),
        max_model_len=_integer(_field(models, "data", "max_model_len")),
        enable_prefix_caching=_flag(facts.get("enable_prefix_caching")),
    )
    return EngineFacts(engine=None if engine == Engine() else engine, model=model)


def cache_config(metrics: str) -> dict[str, str]:
    """The labels of ``vllm:cache_config_info`` in a Prometheus text page; empty if it has none."""
    for line in metrics.splitlines():
        if line.startswith(_CACHE_CONFIG):
            return dict(_LABEL.findall(line))
    return {}


async def _get(client: httpx.AsyncClient, url: str) -> str:
    try:
        response = await client.get(url)
    except httpx.HTTPError:
        return ""
    return response.text if response.status_code == 200 and len(response.content) <= MAX_METRICS_BYTES else ""


def _field(text: str, *path: str) -> str | None:
    """The string (or number) at ``path`` in a JSON text; of a list, its first element's."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    for name in path:
        if isinstance(value, list):
            value = value[0] if value else None
        value = value.get(name) if isinstance(value, dict) else None
    return str(value) if isinstance(value, str | int) else None


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _flag(text: str | None) -> bool | None:
    return {"True": True, "False": False}.get(text or "")
