"""State of an engine before a run: idle or not, its reports of cached tokens, its cache reset, and the words for it.

Every call is harmless: no generation, so that no block enters the prefix cache or leaves it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engines.dialect import Control, Dialect
from engines.facts import PAGES, EngineFacts
from engines.vllm import EMBEDDED_NAME


@dataclass(frozen=True, slots=True)
class Readiness:
    """State of one engine; null: not told."""

    dialect: Dialect
    told: bool = True
    """False: no page tells of an engine."""
    running: int | None = None
    """Requests that it runs, and that wait in it, at the start."""
    waiting: int | None = None
    caches_prefixes: bool | None = None
    reports_cached: bool | None = None
    has_reset: bool | None = None


def readiness_of(control: Control, dialect: Dialect, facts: EngineFacts) -> Readiness:
    """Return the state by the facts just read and at most two more calls."""
    running, waiting = (facts.gauges.get(name) for name in ("running", "waiting"))
    return Readiness(
        dialect=dialect,
        told=facts.known_engine is not None or facts.model is not None or facts.dialect is not None,
        running=None if running is None else int(running),
        waiting=None if waiting is None else int(waiting),
        caches_prefixes=facts.engine.enable_prefix_caching,
        reports_cached=dialect.reports_cached(control),
        has_reset=dialect.has_reset(control),
    )


def readiness_notes(found: Readiness) -> list[str]:
    """Return what spoils a run at this engine, with the setting that mends it."""
    notes = [] if found.told else [f"no engine tells of itself at {', '.join(PAGES)}; expected an engine's base URL"]
    if found.running or found.waiting:
        notes.append(
            f"the engine is not idle: {found.running or 0} requests running, {found.waiting or 0} waiting before the "
            "first; times and hits will not be this load's alone"
        )
    if found.caches_prefixes is False:
        notes.append("the engine's prefix cache is off: no request can hit it")
    if found.reports_cached is False:
        notes.append(unreported(found.dialect))
    return notes


def page_notes(facts: EngineFacts) -> list[str]:
    """Return a note on the first page of the engine that could not be read, with the variable of its key."""
    return [] if facts.problem is None else [f"{facts.problem}; the engine's settings on it stay unknown"]


def unreported(dialect: Dialect) -> str:
    """Return the note on an engine that reports no cached tokens."""
    start = f"; start {dialect.name} with {dialect.cached_setting}" if dialect.cached_setting else ""
    return f"the engine reports no cached tokens: hits stay unknown{start}"


def target_words(url: str, model: str | None, facts: EngineFacts, found: Readiness, evidence: str) -> Sequence[str]:
    """Return the parts of a start line about the engine."""
    engine, dialect = facts.engine, found.dialect
    version = f" {engine.version}" if engine.version else ""
    name = EMBEDDED_NAME if engine.name == EMBEDDED_NAME else dialect.name
    words = [url, f"model {model or 'unknown'}", f"{name}{version}{evidence and f' ({evidence})'}"]
    words.append(f"engine blocks of {engine.block_size or 'unknown size'}")
    if found.reports_cached is None and dialect.cached_setting:
        words.append(f"cached tokens only if started with {dialect.cached_setting}")
    if found.has_reset is False:
        words.append(f"no cache reset{f' ({dialect.reset_setting})' if dialect.reset_setting else ''}")
    return words
