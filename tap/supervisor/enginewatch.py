"""The engines behind the upstreams: reached at the start, then watched for another version or cache configuration."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from engines.control import learn_engine_facts
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine
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
                "or --wait-s to wait for one"
            )
        await asyncio.sleep(RETRY_S)


async def watch_engines(
    origins: Callable[[], Sequence[Origin]],
    known: Engine | None,
    changed: Callable[[Engine], None],
    every_s: float = POLL_S,
) -> None:
    """Ask now and then, for ever. ``changed`` hears what the header's engine has become.

    The header names one engine, so of several upstreams the first that answers speaks for all. One that differs from it
    is said on stderr, once.
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
                print(f"tap: upstream {origin} is another engine than {told[0][0]}", file=sys.stderr, flush=True)


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
    """Return the kind of failure to connect; null: the upstream can be reached."""
    pool = ConnectionPool(origin)
    try:
        (await pool.connect()).abort()
    except ConnectError as error:
        return error.kind
    return None
