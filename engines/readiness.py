"""An engine before a run: its dialect and facts, if it is idle, its cached tokens and reset, and the words for it.

Every call is harmless: no generation, so that no block enters the prefix cache or leaves it.
"""

from dataclasses import dataclass

from engines.control import ControlClient
from engines.detection import Recognised, find_dialect
from engines.dialect import Dialect
from engines.facts import PAGES, EngineFacts
from engines.vllm import EMBEDDED_NAME


@dataclass(frozen=True, slots=True)
class Target:
    """Engine that is looked at; null: not told."""

    url: str
    model: str | None
    found: Recognised
    facts: EngineFacts
    reports_cached: bool | None = None
    has_reset: bool | None = None

    @property
    def dialect(self) -> Dialect:
        return self.found.dialect

    @property
    def block_size(self) -> int | None:
        return self.facts.engine.block_size

    def words(self) -> list[str]:
        """Return the parts of a start line about the engine."""
        engine, dialect, evidence = self.facts.engine, self.dialect, self.found.evidence
        version = f" {engine.version}" if engine.version else ""
        name = EMBEDDED_NAME if engine.name == EMBEDDED_NAME else dialect.name
        words = [self.url, f"model {self.model or 'unknown'}", f"{name}{version}{evidence and f' ({evidence})'}"]
        words.append(f"engine blocks of {engine.block_size or 'unknown size'}")
        if self.reports_cached is None and dialect.cached_setting:
            words.append(f"cached tokens only if started with {dialect.cached_setting}")
        if self.has_reset is False:
            words.append(f"no cache reset{f' ({dialect.reset_setting})' if dialect.reset_setting else ''}")
        return words

    def notes(self) -> list[str]:
        """Return what spoils a run at this engine, with the setting that mends it."""
        return [*self.page_notes(), *self.load_notes(), *self.cache_notes()]

    def page_notes(self) -> list[str]:
        """Return a note on the first page that could not be read, with the variable of its key."""
        problem = self.facts.problem
        return [] if problem is None else [f"{problem}; the engine's settings on it stay unknown"]

    def load_notes(self) -> list[str]:
        """Return notes on an engine that tells nothing, or has requests of others."""
        facts, running, waiting = self.facts, *(int(self.facts.gauges.get(name, 0)) for name in ("running", "waiting"))
        told = facts.known_engine is not None or facts.model is not None or facts.dialect is not None
        notes = [] if told else [f"no engine tells of itself at {', '.join(PAGES)}; expected an engine's base URL"]
        if running or waiting:
            notes.append(
                f"the engine is not idle: {running} requests running, {waiting} waiting before the first; times and "
                "hits will not be this load's alone"
            )
        return notes

    def cache_notes(self) -> list[str]:
        """Return notes on a prefix cache that is off, or whose hits are not reported."""
        is_off = self.facts.engine.enable_prefix_caching is False
        notes = ["the engine's prefix cache is off: no request can hit it"] if is_off else []
        return notes + ([unreported(self.dialect)] if self.reports_cached is False else [])


def look_at(control: ControlClient, model: str, dialect: str = "auto") -> Target:
    """Ask an engine for its dialect, unless that is named, its facts, and its cache by at most two more calls."""
    found, facts = find_dialect(control, dialect), control.facts()
    return with_cache(control, Target(control.url, model, found, facts))


def with_cache(control: ControlClient, target: Target) -> Target:
    """Ask if the engine reports cached tokens, and if its cache can be reset."""
    told = target.dialect.reports_cached(control), target.dialect.has_reset(control)
    return Target(target.url, target.model, target.found, target.facts, *told)


def unreported(dialect: Dialect) -> str:
    """Return the note on an engine that reports no cached tokens."""
    start = f"; start {dialect.name} with {dialect.cached_setting}" if dialect.cached_setting else ""
    return f"the engine reports no cached tokens: hits stay unknown{start}"
