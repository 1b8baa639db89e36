"""The model beside the traffic, as the live page and the metrics show it."""

from collections.abc import Iterator
from typing import Final

import msgspec

from measure import wording
from measure.modelstate import (
    COHORTS,
    LEVELS,
    Estimate,
    ModelState,
    clock_text,
    drift_sentence,
    estimate_text,
    is_within,
    pace_text,
)

STALE_S: Final = 300.0
"""Age of a judgement that the page tells."""
CACHES: Final = {"half": "half of it", "today": "the engine's cache", "twice": "twice of it"}


class Fact(msgspec.Struct, frozen=True):
    """A named number of the recorder, the processes or the model."""

    name: str
    value: str
    alarm: bool = False


class ModelTtft(msgspec.Struct, frozen=True, kw_only=True):
    """A TTFT quantile, seen and forecast."""

    cohort: str
    """Title and count of a cohort's first row, else empty."""
    level: str
    seen: str
    predicted: str
    at_pace: str
    outside: bool
    """The seen value is outside the forecast at the live pace, else outside the model's."""


class ModelCache(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast of the same requests on a cache of another size."""

    title: str
    hits: str
    ttft: list[str]
    """By level; a dash for one that too few requests tell."""
    withheld: str | None


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """A judgement in words."""

    alarm: str | None
    """Null: no drift and no problem."""
    judged: str
    facts: list[Fact]
    line: list[float]
    """The pace of each judgement, oldest first."""
    allowed: tuple[float, float]
    """Paces that the model lets expect."""
    ttft: list[ModelTtft]
    caches: list[ModelCache]
    notes: list[str]


def model_view(state: ModelState | None, now_s: float) -> ModelView:
    """Return the last judgement for the page; None: there was none yet. ``now_s``: wall clock."""
    if state is None:
        judged = "No judgement yet: the first comes a minute after the first request has ended."
        return ModelView(alarm=None, judged=judged, facts=[], line=[], allowed=(1.0, 1.0), ttft=[], caches=[], notes=[])
    alarm = drift_sentence(state) if state.problem is None else f"not watched any more: {state.problem}"
    return ModelView(
        alarm=None if alarm is None else wording.sentence(alarm),
        judged=_judged_text(state, now_s),
        facts=_facts(state),
        line=[factor for _, factor in state.paces],
        allowed=state.allowed,
        ttft=[_ttft(state, place) for place in range(len(state.ttft))],
        caches=[
            ModelCache(
                title=f"{CACHES[row.cache]}, {wording.count(row.num_gpu_blocks)} blocks",
                hits=wording.share(row.hit_rate),
                ttft=[estimate_text(row.ttft.get(level)) for level in LEVELS],
                withheld=row.withheld,
            )
            for row in state.caches
        ],
        notes=[wording.sentence(note) for note in state.notes],
    )


def _judged_text(state: ModelState, now_s: float) -> str:
    if state.until_ms is None:
        return ""
    span = f"{clock_text(state, state.from_ms)} to {clock_text(state, state.until_ms)}"
    text = f"{wording.count(state.requests)} requests that arrived from {span}."
    if state.judged_unix_s is not None and now_s - state.judged_unix_s > STALE_S:
        text += " No judgement since: no requests end, or the watch is away."
    return text


def _facts(state: ModelState) -> list[Fact]:
    low, high = state.allowed
    facts = [Fact("Model", state.model)]
    if state.pace is not None:
        facts.append(Fact("Pace: steps over the model's", pace_text(state), state.drifted))
        facts.append(Fact("Its captures let expect", f"{low:.2f} to {high:.2f}"))
        facts.append(Fact("Intervals measured", wording.count(state.pace.intervals)))
    if state.reported_hit_rate is not None:
        facts.append(Fact("Prompt tokens cached, as reported", wording.share(state.reported_hit_rate)))
    return facts


def _ttft(state: ModelState, place: int) -> ModelTtft:
    row = state.ttft[place]
    first = place == 0 or state.ttft[place - 1].cohort != row.cohort
    return ModelTtft(
        cohort=f"{COHORTS[row.cohort]}, {wording.count(row.n)}" if first else "",
        level=row.level,
        seen=wording.NOTHING if row.seen_ms is None else wording.duration(row.seen_ms),
        predicted=estimate_text(row.predicted),
        at_pace=estimate_text(row.at_pace),
        outside=is_within(row.seen_ms, row.at_pace or row.predicted) is False,
    )


def ttft_seconds(state: ModelState) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Yield TTFT in seconds by (kind, cohort, quantile): seen, predicted and at pace, with ends of their intervals."""
    for row in state.ttft:
        if row.seen_ms is not None:
            yield ("seen", row.cohort, row.level), row.seen_ms / 1e3
        for kind, one in (("predicted", row.predicted), ("at_pace", row.at_pace)):
            for end, value_ms in _ends(one):
                yield (f"{kind}{end}", row.cohort, row.level), value_ms / 1e3


def cache_ttft_seconds(state: ModelState) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield the forecast TTFT in seconds by (cache, quantile)."""
    for row in state.caches:
        for level, one in row.ttft.items():
            if one.middle is not None:
                yield (row.cache, level), one.middle / 1e3


def _ends(one: Estimate | None) -> Iterator[tuple[str, float]]:
    if one is not None:
        for end, value_ms in (("", one.middle), ("_low", one.low), ("_high", one.high)):
            if value_ms is not None:
                yield end, value_ms
