"""Snapshot of the live page, served as ``/live.json``: texts for reading, numbers for drawing."""

import msgspec


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """A number of the first row, with its last minutes."""

    id: str
    title: str
    value: str
    detail: str
    line: list[float]
    """A value a second, oldest first; []: no line."""


class QuantileText(msgspec.Struct, frozen=True):
    """A quantile of one cohort."""

    level: str
    text: str
    """``> x`` where the curve does not reach the level."""


class CohortCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The TTFT survival of one cohort."""

    cohort: str
    title: str
    n: int
    count: str
    """n and the censored share, in words."""
    judged: bool
    """False: too few requests; the curve is empty."""
    quantiles: list[QuantileText]
    times_ms: list[float]
    waiting: list[float]
    low: list[float]
    high: list[float]
    until_ms: float
    """End of the known curve."""


class HitCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Share of prompt tokens that a prefix cache of each size would hold."""

    requests: int
    sentence: str
    note: str
    tokens: list[int]
    hit_share: list[float]
    exact_tokens: int
    """Exact up to this size, estimated from a sample of blocks beyond."""
    engine_tokens: int | None
    """Size of the engine's cache. Null: unknown."""
    engine_share: float | None
    """Share on the curve at that size."""
    measured_share: float | None
    """Share that the engine reported. Null: not reported."""


class PrefixRow(msgspec.Struct, frozen=True):
    """A shared prefix."""

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
    """Ready to serve and to record."""
    status: str
    reasons: list[str]
    at: str
    """Wall clock, HH:MM:SS UTC."""
    minutes: int
    timeline_s: int
    """Seconds of the tiles' lines."""
    tiles: list[Tile]
    by_turn: list[CohortCurve]
    by_uncached: list[CohortCurve]
    hit_curve: HitCurve
    prefixes: list[PrefixRow]
    recorder: list[Fact]
    processes: list[Fact]
    drops: list[Fact]
