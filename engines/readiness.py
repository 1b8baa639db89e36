"""Inspection of an engine before a run: dialect, settings, load, cached-token reports and prefix cache reset.

Every call is harmless: no request generates tokens, so that no block enters or leaves the prefix cache.
"""

from dataclasses import dataclass, replace

from engines.control import ControlClient
from engines.detection import Recognised, find_dialect
from engines.dialect import Dialect
from engines.facts import PAGES, EngineFacts
from engines.vllm import EMBEDDED_NAME


@dataclass(frozen=True, slots=True)
class Target:
    """An inspected engine: model, dialect, KV cache settings; None: not reported."""

    url: str
    model: str | None
    recognised: Recognised
    facts: EngineFacts
    reports_cached: bool | None = None
    has_reset: bool | None = None

    @property
    def dialect(self) -> Dialect:
        return self.recognised.dialect

    @property
    def block_size(self) -> int | None:
        return self.facts.engine.block_size

    def words(self) -> list[str]:
        """Return the parts of the start line about the engine: model, version, block size, cached tokens."""
        engine, dialect, evidence = self.facts.engine, self.dialect, self.recognised.evidence
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
        """Return notes on conditions that spoil a run, such as a disabled prefix cache, with the setting to change."""
        return [*self.page_notes(), *self.load_notes(), *self.cache_notes()]

    def page_notes(self) -> list[str]:
        """Return a note on the first page that could not be read, with the variable of the API key."""
        problem = self.facts.problem
        return [] if problem is None else [f"{problem}; the engine's settings on this page are unknown"]

    def load_notes(self) -> list[str]:
        """Return notes on an engine that reports nothing, or that has running or waiting requests."""
        facts, running, waiting = self.facts, *(int(self.facts.gauges.get(name, 0)) for name in ("running", "waiting"))
        reported = facts.reported_engine is not None or facts.model is not None or facts.dialect is not None
        notes = [] if reported else [f"no engine settings at {', '.join(PAGES)}; expected an engine's base URL"]
        if running or waiting:
            notes.append(
                f"the engine is not idle: {running} requests running, {waiting} waiting before the first; times and "
                "hits will not be this load's alone"
            )
        return notes

    def cache_notes(self) -> list[str]:
        """Return notes on a prefix cache that is off or whose hits are not reported."""
        is_off = self.facts.engine.enable_prefix_caching is False
        notes = ["the engine's prefix cache is off: no request can hit it"] if is_off else []
        return notes + ([unreported(self.dialect)] if self.reports_cached is False else [])


def inspect_engine(control: ControlClient, model: str, dialect: str = "auto") -> Target:
    """Return the engine's dialect, unless named, its facts, and its prefix cache by at most two more calls."""
    recognised, facts = find_dialect(control, dialect), control.facts()
    return probe_cache(control, Target(control.url, model, recognised, facts))


def probe_cache(control: ControlClient, target: Target) -> Target:
    """Return the target with its probed cache: whether it reports cached tokens and can reset the prefix cache."""
    dialect = target.dialect
    return replace(target, reports_cached=dialect.reports_cached(control), has_reset=dialect.has_reset(control))


def unreported(dialect: Dialect) -> str:
    """Return the note for an engine that reports no cached tokens, with the flag to start it with."""
    start = f"; start {dialect.name} with {dialect.cached_setting}" if dialect.cached_setting else ""
    return f"the engine reports no cached tokens: hits stay unknown{start}"
