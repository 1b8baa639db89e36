"""Limits on forecast latency and prefix hits for CI: ``hit_rate.difference>=-1%``, ``ttft.p90<=1s``."""

from collections.abc import Sequence
from typing import Final

from measure.cohorts import ALL
from measure.thresholds import Threshold, parse_threshold
from report.grid.points import LEVELS, TTFT, Span
from sim.forecast.results import EffectGate, ForecastPoint
from tracefile.records.errors import InputError

TIMES: Final = ("ttft", "itl", "e2e")
"""Latency metrics, by quantile level."""
NUMBERS: Final = ("output_tokens_per_s", "hit_rate")
KEYS: Final = ("difference", "ratio")
"""Effects against the base; no key: the forecast value."""


def ttft(cohort: str, level: str) -> str:
    return f"{TTFT}.{cohort}.{level}"


def parse_limit(flag: str, text: str, keys: Sequence[str] = ()) -> Threshold:
    """Parse a limit on latency, throughput or hit rate; ``keys``: allowed effects. Raises InputError."""
    limit = parse_threshold(flag, text, metrics=(*TIMES, *NUMBERS))
    timed = limit.metric in TIMES
    is_time = timed and limit.key != "ratio"
    wrong = (
        (timed and _level(limit) not in LEVELS, f"no level; expected pNN with one of {', '.join(LEVELS)}"),
        (not timed and limit.percentile is not None, f"{limit.metric} has no level"),
        (limit.cohort is not None and limit.metric != TTFT, f"{limit.metric} has no cohort; only ttft has"),
        (limit.key is not None and limit.key not in keys, f"{limit.key!r}; expected {' or '.join(keys) or 'none'}"),
        ((limit.unit == "ms") != is_time, f"expected {'a duration' if is_time else 'a number or a percentage'}"),
    )
    for is_wrong, message in wrong:
        if is_wrong:
            raise InputError(f"{flag} {text}: {message}")
    return limit


def evaluate(gates: Sequence[Threshold], points: Sequence[ForecastPoint]) -> list[EffectGate]:
    """Evaluate gates on each scenario, else on the base. Disagreeing members: uncertain; unknown latency: failed."""
    scenarios = [point for point in points if point.kind == "scenario"]
    bases = [point for point in points if point.kind in ("capture", "base")]
    effects = [gate for gate in gates if gate.key is None or scenarios]  # a base differs from itself in nothing
    return [_evaluated(gate, point) for point in scenarios or bases[-1:] for gate in effects]


def _evaluated(gate: Threshold, point: ForecastPoint) -> EffectGate:
    name = measure_name(gate)
    measure = point.measures.get(name)
    span = None if measure is None else measure.value if gate.key is None else getattr(measure, gate.key)
    passed, sure = (False, True) if span is None or _is_endless(gate, point) else _outcome(gate, span)
    return EffectGate(
        gate=gate.text, point=point.name, measure=name, key=gate.key, passed=passed and sure, sure=sure, span=span
    )


def _is_endless(gate: Threshold, point: ForecastPoint) -> bool:
    """Return if a limit is on the latency of a saturated load, which grows with its duration."""
    return point.saturated and gate.metric in TIMES and gate.op in ("<", "<=")


def _outcome(gate: Threshold, span: Span) -> tuple[bool, bool]:
    passed = span.middle is not None and gate.holds(span.middle)
    return passed, all(gate.holds(end) == passed for end in (span.low, span.high) if end is not None)


def measure_name(limit: Threshold) -> str:
    if limit.metric == "ttft":
        return ttft(limit.cohort or ALL, _level(limit) or "")
    return limit.metric if limit.percentile is None else f"{limit.metric}.{_level(limit)}"


def _level(limit: Threshold) -> str | None:
    return None if limit.percentile is None else f"p{limit.percentile:g}"
