"""A search as records: exactly what ``sim search --json`` writes, and what its table and its page read."""

from typing import Final, Literal

import msgspec

from report.pages.whatifresults import Span

SCHEMA: Final = "kvtape-search/1"
Quantity = Literal["num-gpu-blocks", "rate"]
Outcome = Literal["found", "all hold", "none holds", "interrupted"]
"""``all hold``: even the hardest value asked for does; ``none holds``: not even the easiest does."""


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """One value of what was searched, forecast."""

    value: float
    ttft: Span
    """The target's percentile over the members."""
    share: float
    """Of the members that keep the target."""
    holds: bool
    """The share is at least the confidence asked for."""
    hit_rate: float
    """The middle member's."""
    load: float | None
    """Share of what the engine can do."""
    saturated: bool
    warnings: list[str]
    """What this forecast rests on that no capture showed."""


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """A whole search."""

    schema: Literal["kvtape-search/1"] = SCHEMA
    trace: str
    trace_digest: str
    model_digest: str
    quantity: Quantity
    target: str
    """As given: ``p90<=500ms``."""
    percentile: float
    """Between 0 and 1."""
    limit_ms: float
    cohort: str
    confidence: float
    low: float
    """The least value asked for."""
    high: float
    """The largest."""
    tolerance: float
    """Relative distance of two values from which they are not told apart."""
    scenario: str
    """What else differs from the capture."""
    members: int
    seed: int
    paced: bool
    requests: int
    """In the cohort."""
    outcome: Outcome
    answer: float | None
    """The smallest or the highest value that holds with every evaluated value on its safe side. Null: none."""
    evaluated: list[Evaluated]
    """In order of value: the curve."""
    notes: list[str]
