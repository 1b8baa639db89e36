"""The engines behind the upstreams, watched: with another version or cache configuration it is another engine."""

import asyncio
import sys
from collections.abc import Callable, Sequence

from tap.supervisor.enginefacts import changed_engine, learn_engine_facts
from tracefile.records.schema import Engine
from wire.url import Origin

POLL_S = 30.0


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
            (origin, facts.engine) for origin, facts in zip(asked, answers, strict=True) if facts.engine is not None
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
