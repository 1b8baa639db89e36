"""A what-if as records: exactly what ``sim what-if --json`` writes, and what its table and its page read."""

from typing import Final, Literal

import msgspec

from measure.cohorts import MAIN, cohort_title

SCHEMA: Final = "kvtape-what-if/1"
LEVELS: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
TTFT: Final = "ttft"


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A number and where the confidence's share of the members have it. Null: past what the run shows."""

    middle: float | None
    """The middle member's. Null with ``beyond``: more than that; null without: not known."""
    low: float | None
    high: float | None
    beyond: float | None = None
    """What is surely exceeded, where the curve stops before the level."""


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a forecast, and what the scenario does to it: member by member, so luck that both share is not
    in the interval."""

    value: Span
    difference: Span | None = None
    """Alternative − captured. Null: this is the captured one."""
    ratio: Span | None = None
    """Alternative / captured."""


class DemandSaid(msgspec.Struct, frozen=True, kw_only=True):
    """What the load asks of the engine, per second of its arrivals; null: fewer than two independent arrivals."""

    load: float | None
    """Share of what the engine can do: 1 and more is saturated."""
    prefill: float | None
    """Seconds of step time for uncached prompt tokens."""
    decode: float | None
    """Seconds of step time for generated tokens."""
    frontend: float | None
    """Seconds of the front end on the engine's core."""
    yield_at_most: float | None
    """Seconds of such work in a second of the engine at its fullest."""
    in_flight_growth_per_s: float | None
    """Requests by which those in flight grow in a second, over the arrivals that wait for nobody."""
    in_flight_at_end: int
    """Requests in flight when the last of these comes, itself not included."""
    saturated: bool


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT survival: the share of requests still without a first token after each time."""

    time_ms: list[float]
    middle: list[float]
    low: list[float]
    high: list[float]
    stops: bool
    """It ends where the capture would have ended, with requests still waiting: saturated, open loop."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario, or the capture as it was."""

    name: str
    settings: dict[str, int | str | bool]
    """Engine settings that differ from the capture's."""
    rate: float
    cold_prompts: bool
    num_gpu_blocks: int
    measures: dict[str, Measure]
    """By name: see docs/metrics.md."""
    demand: DemandSaid
    warnings: list[str]
    """What the forecast rests on that no capture showed."""
    curves: dict[str, Curve]
    """By cohort."""


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """A whole what-if; the first row is the capture as it was."""

    schema: Literal["kvtape-what-if/1"] = SCHEMA
    trace: str
    """The file's name."""
    trace_digest: str
    model_digest: str
    members: int
    seed: int
    confidence: float
    """Share of the members inside every interval."""
    paced: bool
    """Later turns wait for the answers before them."""
    requests: int
    cohorts: dict[str, int]
    """Requests by cohort."""
    notes: list[str]
    rows: list[Row]


def ttft(cohort: str, level: str) -> str:
    """The name of a TTFT quantile among the measures."""
    return f"{TTFT}.{cohort}.{level}"


def telling_cohort(result: WhatIf) -> str:
    """Later turns, where a cache shows; all requests where a trace has none."""
    return MAIN[-1] if MAIN[-1] in result.cohorts else MAIN[0]


def cohort_titles(result: WhatIf) -> dict[str, str]:
    """Title by cohort, in the order they are shown."""
    return {name: cohort_title(name) for name in MAIN if name in result.cohorts}
