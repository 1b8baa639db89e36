"""Results of ``sim curve`` and ``sim misses``, as ``--json`` writes them; docs/curves.md defines every key."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseShare:
    """The prompt tokens of some requests by cause; they add up to ``input_tokens``."""

    name: str
    requests: int
    input_tokens: int
    tokens: dict[str, int]
    """By cause, as docs/curves.md defines them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Prompt tokens of a trace by cause."""

    block_size: int
    usable_blocks: int | None
    """Null: unlimited."""
    rejected: int
    """Requests that alone do not fit the pool: they touch nothing and are in no sum."""
    total: CauseShare
    cohorts: list[CauseShare]
    """By turn; cohorts without requests are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Distances between two accesses of one block, over all accesses but first ones."""

    unit: str
    count: int
    mean: float | None
    """Null: there are none."""
    quantiles: list[float]
    """At even levels up to 1: the smallest value that at least that share does not exceed. Empty: there are none."""

    def at(self, level: float) -> float:
        return self.quantiles[round(level * len(self.quantiles)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Reuse of one trace's blocks."""

    block_size: int
    requests: int
    accesses: int
    first_accesses: int
    """Of blocks never touched before; the others are what the distributions are over."""
    levels: tuple[float, ...]
    time_ms: Distribution
    distance_blocks: Distribution
