"""Limits that a comparison must keep: ``predicted.turns2+.ttft.p50.error<=0.10``, for CI to hold.

The path is the one of the JSON below ``pairs.LABEL.cohorts``. A cell that is not judged fails its gate: what could
not be measured was not shown to hold.
"""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from measure.cohorts import cohort_order, known_cohorts
from report.compare.results import METRICS, CachedAgreement, DurationError, GateResult, Pair, QuantileError
from tracefile.records.errors import InputError

_OPERATORS: Final[dict[str, Callable[[float, float], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_EXPRESSION: Final = re.compile(
    r"(?P<path>[^<>=]+?)\s*(?P<op><=|>=|<|>)\s*(?P<limit>-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)\s*(?P<percent>%?)"
)
_QUANTILES: Final = ("p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Gate:
    """One limit, checked to name something that exists before any work is done."""

    expression: str
    label: str
    cohort: str
    fields: tuple[str, ...]
    op: str
    limit: float


def parse_gate(expression: str, labels: Sequence[str]) -> Gate:
    """Read ``LABEL.COHORT.METRIC.KEY[.KEY]<=NUMBER[%]``; ``labels`` are those that have a truth."""
    match = _EXPRESSION.fullmatch(expression.strip())
    if match is None:
        raise InputError(f"--gate {expression}: not a limit; expected e.g. predicted.turns2+.ttft.p50.error<=0.10")
    path = match["path"].strip()
    # A label may hold dots itself: the longest one that fits is meant.
    label = max((label for label in labels if path.startswith(f"{label}.")), key=len, default=None)
    if label is None:
        raise InputError(f"--gate {expression}: starts with no compared label; expected one of {', '.join(labels)}")
    cohort, *fields = path[len(label) + 1 :].split(".")
    if cohort not in known_cohorts():
        raise InputError(f"--gate {expression}: no cohort {cohort!r}; expected one of {', '.join(known_cohorts())}")
    _check_fields(expression, fields)
    limit = float(match["limit"]) / (100.0 if match["percent"] else 1.0)
    return Gate(expression, label, cohort, tuple(fields), match["op"], limit)


def check_gate(gate: Gate, pairs: dict[str, Pair]) -> GateResult:
    """Look the value up and hold it against the limit."""

    def failed(reason: str) -> GateResult:
        return GateResult(expression=gate.expression, value=None, passed=False, reason=reason)

    cohort = pairs[gate.label].cohorts.get(gate.cohort)
    if cohort is None:
        there = ", ".join(cohort_order(set(pairs[gate.label].cohorts)))
        return failed(f"no requests in cohort {gate.cohort}; there are {there}")
    found: object = cohort
    for name in gate.fields:
        found = getattr(found, name, None)
    if not isinstance(found, int | float):
        return failed("not judged: too few requests, or the value does not exist")
    passed = _OPERATORS[gate.op](found, gate.limit)
    return GateResult(
        expression=gate.expression,
        value=found,
        passed=passed,
        reason=f"{found:.4g} {'keeps' if passed else 'breaks'} it",
    )


def _check_fields(expression: str, fields: Sequence[str]) -> None:
    metric = fields[0] if fields else ""
    if metric not in ("cached", *METRICS):
        raise InputError(f"--gate {expression}: no metric {metric!r}; expected one of cached, {', '.join(METRICS)}")
    expected = [
        name
        for name in (CachedAgreement if metric == "cached" else DurationError).__struct_fields__
        if name not in ("worst", *_QUANTILES)
    ]
    if metric != "cached":
        expected += [f"{level}.{name}" for level in _QUANTILES for name in QuantileError.__struct_fields__]
    if ".".join(fields[1:]) not in expected:
        raise InputError(
            f"--gate {expression}: no key {'.'.join(fields[1:])!r} of {metric}; expected one of {', '.join(expected)}"
        )
