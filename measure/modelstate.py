"""State of a latency model beside live traffic: the file that ``sim watch`` keeps."""

import math
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

from measure import wording

STATE_SCHEMA: Final = "kvtape-modelstate/1"
LEVELS: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
NEAR: Final = 1.01
COHORTS: Final = {"all": "all requests", "warm": "warm: half of the prompt cached", "cold": "cold: less cached"}
CacheName = Literal["half", "today", "twice"]


class Estimate(msgspec.Struct, frozen=True):
    """A forecast value: its median and the ends of its interval. Null: beyond the last first token."""

    middle: float | None
    low: float | None
    high: float | None

    @property
    def reach(self) -> float:
        """Half of the interval over the median; infinite: open above."""
        if self.middle is None or self.low is None or self.high is None:
            return math.inf
        return (self.high - self.low) / 2.0 / self.middle


class LivePace(msgspec.Struct, frozen=True, kw_only=True):
    """Time of the engine's steps over the model's."""

    factor: float
    low: float
    """Ends of a 95 % interval."""
    high: float
    intervals: int
    """Seen intervals between tokens that it is measured on."""
    outside: bool
    """Outside the model's own range of drift, by more than the measurement's error."""


class TtftRow(msgspec.Struct, frozen=True, kw_only=True):
    """A TTFT quantile of a cohort of the judged requests, ms."""

    cohort: str
    level: str
    n: int
    seen_ms: float | None
    """Null: more than the rest waited for no first token."""
    predicted: Estimate
    """By the model; its drift is in the interval."""
    at_pace: Estimate | None
    """By the model at the live pace. Null: the pace is not known."""


class CacheRow(msgspec.Struct, frozen=True, kw_only=True):
    """The same requests on a cache of another size."""

    cache: CacheName
    num_gpu_blocks: int
    hit_rate: float
    """Cached share of prompt tokens: LRU over full blocks."""
    ttft: dict[str, Estimate] = {}
    """By level. Empty: ``withheld`` tells the reason."""
    withheld: str | None = None


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """A latency model beside the last minutes of a trace. Times in ms on the trace's clock."""

    schema: Literal["kvtape-modelstate/1"] = STATE_SCHEMA
    model: str
    """Name of the model's file."""
    allowed: tuple[float, float]
    """Range of drift: paces that the model's captures let expect."""
    judged_unix_s: float | None = None
    """Wall clock of ``until_ms``. Null: the trace does not tell it."""
    from_ms: float | None = None
    until_ms: float | None = None
    """The judged requests arrived between these. Null: none were judged yet."""
    requests: int = 0
    reported_hit_rate: float | None = None
    """Cached share of prompt tokens, as the engine reports. Null: it does not."""
    pace: LivePace | None = None
    """Null: a note tells the reason."""
    paces: list[tuple[float, float]] = []
    """Earlier judgements within the window: time, factor."""
    drifted: bool = False
    """The pace has been outside for several judgements in a row, and not been back for as many."""
    drifted_since_ms: float | None = None
    ttft: list[TtftRow] = []
    caches: list[CacheRow] = []
    """Empty: a note tells the reason."""
    notes: list[str] = []
    problem: str | None = None
    """Reason why the watch ended. Null: it goes on."""


decode_state: Final = msgspec.json.Decoder(ModelState).decode


def encode_state(state: ModelState) -> bytes:
    """Return a line of JSON."""
    return msgspec.json.encode(state) + b"\n"


def pace_text(state: ModelState) -> str:
    """Return the pace with its interval: 1.02 (0.99 to 1.05)."""
    pace = state.pace
    return wording.NOTHING if pace is None else f"{pace.factor:.2f} ({pace.low:.2f} to {pace.high:.2f})"


def drift_sentence(state: ModelState) -> str | None:
    """Return the alarm in words; None: the model has not drifted."""
    if not state.drifted:
        return None
    low, high = state.allowed
    began = clock_text(state, state.drifted_since_ms)
    return (
        f"the model has drifted: steps take {pace_text(state)} of its time since {began}, its captures let expect "
        f"{low:.2f} to {high:.2f}; scale it (sim fit --pace-from) or fit it again"
    )


def is_pace_uncertain(state: ModelState) -> bool:
    """Return if the last pace's own interval is wider than the range of drift, so that a drift of it would not show."""
    pace = state.pace
    return pace is None or (not pace.outside and pace.high / pace.factor > state.allowed[1])


def clock_text(state: ModelState, time_ms: float | None) -> str:
    """Return a time of the trace as HH:MM:SS UTC, or as seconds of the trace where its wall clock is not known."""
    if time_ms is None:
        return wording.NOTHING
    if state.judged_unix_s is None or state.until_ms is None:
        return f"{time_ms / 1e3:.0f} s"
    at_s = state.judged_unix_s + (time_ms - state.until_ms) / 1e3
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S UTC")


def estimate_text(one: Estimate | None) -> str:
    """Return a forecast time with its interval: 118 ms (110 to 126)."""
    if one is None or one.middle is None:
        return wording.NOTHING
    low, high = (wording.NOTHING if end is None else wording.duration(end) for end in (one.low, one.high))
    return f"{wording.duration(one.middle)} ({low} to {high})"


def is_within(seen_ms: float | None, one: Estimate | None) -> bool | None:
    """Return whether a seen value is within a hundredth of a forecast's interval; None: one of them is not known."""
    if seen_ms is None or one is None or one.low is None:
        return None
    return one.low / NEAR <= seen_ms and (one.high is None or seen_ms <= one.high * NEAR)
