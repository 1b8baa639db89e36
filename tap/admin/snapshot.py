"""What the live page shows, as one value: texts as they are read, numbers as they are drawn. It is ``/live.json``."""

import msgspec


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """One number of the first row, with its last minutes."""

    id: str
    title: str
    value: str
    detail: str
    line: list[float]
    """A value a second, oldest first; []: it has no line."""


class QuantileText(msgspec.Struct, frozen=True):
    """A quantile of one cohort."""

    level: str
    text: str
    """``> x`` where the curve does not get there."""


class CohortCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The TTFT survival of one cohort."""

    cohort: str
    title: str
    n: int
    count: str
    """n and the censored share, in words."""
    judged: bool
    """False: too few to say anything; the curve is empty."""
    quantiles: list[QuantileText]
    times_ms: list[float]
    waiting: list[float]
    low: list[float]
    high: list[float]
    until_ms: float
    """The curve says nothing beyond."""


class HitPotential(msgspec.Struct, frozen=True, kw_only=True):
    """Share of prompt tokens that a prefix cache of each size would have held."""

    requests: int
    sentence: str
    note: str
    tokens: list[int]
    """Cache sizes."""
    hit_share: list[float]
    exact_tokens: int
    """Up to this size the curve is exact, beyond it estimated from a sample of blocks."""
    engine_tokens: int | None
    """The real cache's size. Null: unknown."""
    engine_share: float | None
    """What the curve says of that size."""
    measured_share: float | None
    """What the engine said it took from its cache. Null: it did not say."""


class PrefixRow(msgspec.Struct, frozen=True):
    """One shared prefix."""

    hash: str
    depth: str
    requests: str
    share: str
    bar: float
    """The share as a number, 0 to 1."""


class Fact(msgspec.Struct, frozen=True):
    """A named number of the recorder or the processes."""

    name: str
    value: str
    alarm: bool = False


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The page at one moment."""

    trace: str
    engine: str
    ready: bool
    """To serve, and to record."""
    status: str
    """A word or two for the page's corner."""
    reasons: list[str]
    """Why it is not ready."""
    at: str
    """Wall clock, HH:MM:SS UTC."""
    minutes: int
    """How far back curves and shares go."""
    timeline_s: int
    """How far back the tiles' lines go."""
    tiles: list[Tile]
    by_turn: list[CohortCurve]
    by_uncached: list[CohortCurve]
    potential: HitPotential
    prefixes: list[PrefixRow]
    recorder: list[Fact]
    processes: list[Fact]
    drops: list[Fact]
