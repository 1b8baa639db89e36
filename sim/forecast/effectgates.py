"""Gates of what-ifs: limits on a scenario's forecast or effect, such as ``hit_rate.difference>=-1%``, for CI."""

from collections.abc import Sequence
from typing import Final

from measure.cohorts import ALL
from measure.thresholds import Threshold, parse_threshold
from report.pages.whatif import LEVELS, EffectGate, Measure, Row, Span, ttft
from tracefile.records.errors import InputError

TIMES: Final = ("ttft", "itl", "e2e", "queue")
"""Metrics with levels."""
NUMBERS: Final = ("output_tokens_per_s", "hit_rate")
KEYS: Final = ("difference", "ratio")
"""Effects on the base; without one, the forecast itself is limited."""


def parse_gate(text: str) -> Threshold:
    """Read a gate; raises InputError for a limit that no forecast could be held to."""
    return _checked("--gate", text, KEYS)


def parse_slo(text: str) -> Threshold:
    """Read a limit on a forecast itself; raises InputError like ``parse_gate``."""
    return _checked("--slo", text, ())


def _checked(flag: str, text: str, keys: Sequence[str]) -> Threshold:
    found = parse_threshold(flag, text, metrics=(*TIMES, *NUMBERS))
    wanted = f"pNN with one of {', '.join(LEVELS)}"
    if found.metric in TIMES and _level(found) not in LEVELS:
        example = "ttft.p95.ratio<=1.05" if keys else "ttft.p95<=1s"
        raise InputError(f"{flag} {text}: {_level(found) or 'no level'}; expected {wanted}, as in {example}")
    if found.metric in NUMBERS and (found.percentile is not None or found.cohort is not None):
        example = "hit_rate.difference>=-1%" if keys else "hit_rate>=30%"
        raise InputError(f"{flag} {text}: {found.metric} has no level or cohort; expected as in {example}")
    if found.cohort is not None and found.metric != "ttft":
        raise InputError(f"{flag} {text}: {found.metric} has no cohort; expected cohorts before ttft only")
    if found.key is not None and found.key not in keys:
        expected = f"{' or '.join(keys)}, or neither" if keys else "the value itself"
        raise InputError(f"{flag} {text}: {found.key!r}; expected {expected}")
    if (found.unit == "ms") != (found.metric in TIMES and found.key != "ratio"):
        wants = "a duration" if found.metric in TIMES and found.key != "ratio" else "a number or a percentage"
        raise InputError(f"{flag} {text}: the limit is {found.unit}; expected {wants}")
    return found


def judge(gates: Sequence[Threshold], rows: Sequence[Row]) -> list[EffectGate]:
    """Judge every scenario by every gate: members that differ leave it open, a value that is not known fails.

    Where nothing differs from the base, the base itself is judged: its difference is 0, its ratio 1.
    """
    scenarios = [row for row in rows if row.kind == "scenario"]
    bases = [row for row in rows if row.kind in ("capture", "base")]
    return [_judged(gate, row) for row in scenarios or bases[-1:] for gate in gates]


def _judged(gate: Threshold, row: Row) -> EffectGate:
    name = measure_name(gate)
    measure = row.measures.get(name)
    span = None if measure is None else _span(gate, measure, row)
    if span is None:
        return EffectGate(gate=gate.text, row=row.name, measure=name, key=gate.key, passed=False, sure=True, span=None)
    ends = [end for end in (span.low, span.high) if end is not None]
    if span.middle is None:
        # More than ``beyond``: only a lower limit below that surely holds.
        passed = span.beyond is not None and gate.op in (">", ">=") and gate.holds(span.beyond)
    else:
        passed = gate.holds(span.middle)
    sure = all(gate.holds(end) == passed for end in ends)
    return EffectGate(
        gate=gate.text,
        row=row.name,
        measure=name,
        key=gate.key,
        passed=passed and sure,
        sure=sure,
        span=span,
    )


def _span(gate: Threshold, measure: Measure, row: Row) -> Span | None:
    if gate.key is not None and row.kind != "scenario":
        same = 1.0 if gate.key == "ratio" else 0.0
        return Span(middle=same, low=same, high=same)
    return {"difference": measure.difference, "ratio": measure.ratio}.get(gate.key or "", measure.value)


def measure_name(gate: Threshold) -> str:
    """Return the measure that a limit is on, as forecasts name it."""
    if gate.metric == "ttft":
        return ttft(gate.cohort or ALL, _level(gate) or "")
    return gate.metric if gate.percentile is None else f"{gate.metric}.{_level(gate)}"


def _level(gate: Threshold) -> str | None:
    return None if gate.percentile is None else f"p{gate.percentile:g}"
