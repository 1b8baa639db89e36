"""TTFT survival of the last minutes: the share of requests still without their first token after t, by cohort.

Kaplan–Meier over buckets of time: aborts and timeouts before the first token are censored, since when it would have
come is unknown; errors compete, since those requests never get one (Aalen–Johansen). Requests that end in a bucket are
taken to be at risk throughout it, so the curve is exact at the buckets' bounds, which lie 5 % apart, whatever fell
between them as long as no censoring comes before an end in the same bucket; memory does not grow with traffic.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Final, Literal

from tap.admin.window import Window
from tap.ipc.feed import SeenRecord

FIRST_MS: Final = 0.1
LAST_MS: Final = 600_000.0
STEP: Final = 1.05
BOUNDS_MS: Final = tuple(
    FIRST_MS * STEP**step for step in range(math.ceil(math.log(LAST_MS / FIRST_MS) / math.log(STEP)) + 1)
)
"""Upper bounds of the time buckets; one more bucket is beyond them."""
UNCACHED_EDGES: Final = (0, 256, 1_024, 4_096, 16_384)
"""Lower edges of the buckets of prompt tokens that the cache did not hold; the last is open. As in reports."""
MIN_JUDGED: Final = 30
"""Smaller cohorts are not judged."""
LEVELS: Final = (0.5, 0.9, 0.99)
_Z: Final = 1.959964
_ROUNDING: Final = 1e-9

End = Literal["token", "failed", "censored"]


@dataclass(slots=True)
class Waits:
    """Waits for a first token, counted by time bucket and by how they ended."""

    tokens: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_MS) + 1))
    failed: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_MS) + 1))
    censored: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_MS) + 1))

    def count(self, time_ms: float, end: End) -> None:
        """Count one wait."""
        counts = {"token": self.tokens, "failed": self.failed, "censored": self.censored}[end]
        counts[bisect_left(BOUNDS_MS, time_ms)] += 1

    def add(self, other: "Waits") -> None:
        """Add other requests' waits."""
        self.tokens = list(map(add, self.tokens, other.tokens))
        self.failed = list(map(add, self.failed, other.failed))
        self.censored = list(map(add, self.censored, other.censored))


@dataclass(frozen=True, slots=True)
class Survival:
    """One cohort's curve."""

    n: int
    censored: int
    failed: int
    times_ms: list[float]
    """Where the curve steps, ascending."""
    waiting: list[float]
    """Share still without a first token just after each time."""
    low: list[float]
    high: list[float]
    """Pointwise 95 % band, requests taken as independent."""
    quantiles_ms: list[float | None]
    """Per level of ``LEVELS``: by when its share had the token. Null: later than was seen."""
    known_until_ms: float
    """The bound of the longest wait's bucket."""


def wait_of(record: SeenRecord) -> tuple[float, End] | None:
    """How long a request waited for its first token, and how the wait ended; null if it never waited for one."""
    if record.ttft_ms is not None:
        return record.ttft_ms, "token"
    if not record.stream or record.e2e_ms is None or record.status == "ok":
        return None
    return record.e2e_ms, "failed" if record.status in ("error", "upstream_abort") else "censored"


def cohorts_of(record: SeenRecord) -> list[str]:
    """The cohorts that a request is in: by its turn, and by what the cache did not hold of its prompt."""
    cohorts = ["all"]
    if record.turn is not None:
        cohorts.append("turn1" if record.turn == 1 else "turns2+")
    if record.prompt_tokens is not None and record.cached_tokens is not None:
        cohorts.append(_uncached_cohort(max(0, record.prompt_tokens - record.cached_tokens)))
    return cohorts


def cohort_names() -> list[str]:
    """Every cohort, in the order they are shown."""
    return ["all", "turn1", "turns2+", *(_uncached_cohort(edge) for edge in UNCACHED_EDGES)]


class SurvivalCurves:
    """Takes records; tells the curves of the recent ones."""

    def __init__(self) -> None:
        self._windows = {name: Window(Waits) for name in cohort_names()}

    def take(self, record: SeenRecord, now_s: float) -> None:
        """Count one record in each of its cohorts."""
        wait = wait_of(record)
        if wait is not None:
            for name in cohorts_of(record):
                self._windows[name].bucket(now_s).count(*wait)

    def recent(self, now_s: float) -> dict[str, Survival]:
        """The curve of every cohort that had a request in the last minutes."""
        curves = {}
        for name, window in self._windows.items():
            waits = Waits()
            for minute in window.buckets(now_s):
                waits.add(minute)
            curve = survival(waits)
            if curve.n:
                curves[name] = curve
        return curves


def survival(waits: Waits) -> Survival:
    """The curve of these waits."""
    at_risk = n = sum(waits.tokens) + sum(waits.failed) + sum(waits.censored)
    free, share = 1.0, 0.0
    variance = _Variance()
    times, waiting, low, high = [], [], [], []
    last = 0
    for bucket, (tokens, failed, censored) in enumerate(zip(waits.tokens, waits.failed, waits.censored, strict=True)):
        if tokens + failed + censored:
            last = bucket
        if tokens + failed:
            share += free * tokens / at_risk
            variance.step(at_risk, tokens, tokens + failed, free, share)
            free *= 1 - (tokens + failed) / at_risk
        if tokens:
            below, above = _band(share, variance.of(share))
            times.append(_bound_ms(bucket))
            waiting.append(1 - share)
            low.append(1 - above)
            high.append(1 - below)
        at_risk -= tokens + failed + censored
    return Survival(
        n=n,
        censored=sum(waits.censored),
        failed=sum(waits.failed),
        times_ms=times,
        waiting=waiting,
        low=low,
        high=high,
        quantiles_ms=[_quantile(times, waiting, level) for level in LEVELS],
        known_until_ms=_bound_ms(last),
    )


class _Variance:
    """The variance of a cumulative incidence by the delta method, as sums that grow from step to step.

    With F(t) the incidence, S the share free of any end before a step, d₁ of d ends tokens and r at risk:
    Σ (F(t)−Fᵢ)² d/(r(r−d)) + Σ S² (r−d₁)d₁/r³ − 2 Σ (F(t)−Fᵢ) S d₁/r². Without competing ends it is Greenwood's.
    """

    __slots__ = ("_a", "_af", "_aff", "_b", "_c", "_cf")

    def __init__(self) -> None:
        self._a = self._af = self._aff = self._b = self._c = self._cf = 0.0

    def step(self, at_risk: int, tokens: int, ends: int, free: float, share: float) -> None:
        if ends < at_risk:
            a = ends / (at_risk * (at_risk - ends))
            self._a += a
            self._af += a * share
            self._aff += a * share * share
        c = free * tokens / at_risk**2
        self._b += free * free * (at_risk - tokens) * tokens / at_risk**3
        self._c += c
        self._cf += c * share

    def of(self, share: float) -> float:
        return max(
            0.0,
            share * share * self._a - 2 * share * self._af + self._aff + self._b - 2 * (share * self._c - self._cf),
        )


def _band(share: float, variance: float) -> tuple[float, float]:
    """A 95 % interval of a share, made on the log-odds so that it stays within 0 and 1."""
    if share <= 0 or share >= 1 or variance <= 0:
        return share, share
    odds = math.log(share / (1 - share))
    spread = _Z * math.sqrt(variance) / (share * (1 - share))
    return _share_of_odds(odds - spread), _share_of_odds(odds + spread)


def _share_of_odds(odds: float) -> float:
    return 1 / (1 + math.exp(-min(max(odds, -700.0), 700.0)))


def _quantile(times: Sequence[float], waiting: Sequence[float], level: float) -> float | None:
    for time_ms, share in zip(times, waiting, strict=True):
        if 1 - share >= level - _ROUNDING:
            return time_ms
    return None


def _bound_ms(bucket: int) -> float:
    return BOUNDS_MS[min(bucket, len(BOUNDS_MS) - 1)]


def _uncached_cohort(tokens: int) -> str:
    place = max(place for place, edge in enumerate(UNCACHED_EDGES) if edge <= tokens)
    edge = UNCACHED_EDGES[place]
    last = place == len(UNCACHED_EDGES) - 1
    return f"uncached:{edge}+" if last else f"uncached:{edge}-{UNCACHED_EDGES[place + 1] - 1}"
