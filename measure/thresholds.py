"""Latency and throughput thresholds of gates, searches and SLOs: ``[LABEL.][COHORT.]metric[.pNN][.key]<=LIMIT``."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from measure.cohorts import all_cohorts
from tracefile.commandline.durations import UNIT_SECONDS
from tracefile.records.errors import InputError

if TYPE_CHECKING:
    from tracefile.records.arrays import BoolArray, FloatArray

Unit = Literal["ms", "share", "number"]

EXAMPLE: Final = "turns2+.ttft.p90<=500ms"
BELOW_SATURATION: Final[Mapping[str, float]] = {"p50": 0.05, "p90": 0.10, "p99": 0.15}
"""Largest |error| of a forecast's TTFT quantiles."""
IN_SATURATION: Final[Mapping[str, float]] = {"p50": 0.15}
"""In saturation a small error of the rate is a large error of the queue: only the median is limited."""
TOO_UNCERTAIN: Final = "too uncertain to say"


def is_uncertain(value: float, limit: float, noise: float) -> bool:
    """Return whether noise exceeds the limit and the value: the verdict is ``TOO_UNCERTAIN``."""
    return noise > abs(limit) and abs(value) <= noise


_OPERATORS: Final[dict[str, Callable[[Any, float], Any]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_UNITS: Final[dict[str, tuple[Unit, float]]] = {
    "": ("number", 1.0),
    "%": ("share", 0.01),
    **{unit: ("ms", 1e3 * float(seconds)) for unit, seconds in UNIT_SECONDS.items()},
}
_THRESHOLD: Final = re.compile(
    r"(?P<path>[^<>=]+?)\s*(?P<op><=|>=|<|>)\s*(?P<limit>-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)\s*(?P<unit>%|ms|s|m|h|d|)"
)
_SUFFIX: Final = re.compile(r"(?:\.p(?P<percentile>\d{1,2}(?:\.\d+)?))?(?:\.(?P<key>(?!p\d)[a-z]\w*))?")


@dataclass(frozen=True, slots=True)
class Threshold:
    """Limit on a latency, throughput or share."""

    text: str
    """Text of the threshold, stripped."""
    label: str | None
    """None: all labels."""
    cohort: str | None
    """None: all requests."""
    metric: str
    percentile: float | None
    """Above 0 and below 100."""
    key: str | None
    """Derived figure of the metric, such as ``error``; None: the value."""
    op: str
    limit: float
    """In ms, as a fraction, or a plain number, as ``unit`` says."""
    unit: Unit

    def holds(self, value: float) -> bool:
        return bool(_OPERATORS[self.op](value, self.limit))

    def meets(self, values: "FloatArray") -> "BoolArray":
        """Return for each value whether it meets the threshold; NaN does not."""
        result: BoolArray = _OPERATORS[self.op](values, self.limit)
        return result


def parse_threshold(flag: str, text: str, *, metrics: Sequence[str], labels: Sequence[str] = ()) -> Threshold:
    """Parse a threshold on one of ``metrics``, after the longest matching label. Raises InputError naming the flag."""
    text = text.strip()
    match = _THRESHOLD.fullmatch(text)
    if match is None:
        raise InputError(f"{flag} {text}: not a threshold; expected [LABEL.][COHORT.]metric.pNN<=LIMIT, as {EXAMPLE}")
    path = match["path"]
    label = _longest_prefix(path, labels)
    path = path if label is None else path[len(label) + 1 :]
    cohort = _longest_prefix(path, all_cohorts())
    path = path if cohort is None else path[len(cohort) + 1 :]
    metric = next((name for name in metrics if path == name or path.startswith(f"{name}.")), None)
    if metric is None:
        raise InputError(f"{flag} {text}: {_unknown_word(path, label, cohort, metrics, labels)}")
    suffix = _SUFFIX.fullmatch(path[len(metric) :])
    if suffix is None or (suffix["percentile"] is not None and float(suffix["percentile"]) == 0.0):
        raise InputError(
            f"{flag} {text}: {path[len(metric) + 1 :]!r}; expected pNN, a key, or pNN.key, as in {EXAMPLE}"
        )
    unit, factor = _UNITS[match["unit"]]
    return Threshold(
        text=text,
        label=label,
        cohort=cohort,
        metric=metric,
        percentile=None if suffix["percentile"] is None else float(suffix["percentile"]),
        key=suffix["key"],
        op=match["op"],
        limit=float(match["limit"]) * factor if factor >= 1.0 else float(match["limit"]) / 100.0,
        unit=unit,
    )


def _longest_prefix(path: str, names: Sequence[str]) -> str | None:
    return max((name for name in names if path.startswith(f"{name}.")), key=len, default=None)


def _unknown_word(
    path: str, label: str | None, cohort: str | None, metrics: Sequence[str], labels: Sequence[str]
) -> str:
    """Return the first word of the path that is no label, cohort or metric, and the expected words."""
    word, _, suffix = path.partition(".")
    next_word = suffix.partition(".")[0]
    if cohort is None and next_word in metrics and not (label is None and labels):
        return f"no cohort {word!r}; expected one of {', '.join(all_cohorts())}"
    if label is None and labels and (next_word in metrics or _longest_prefix(suffix, all_cohorts())):
        return f"no compared label {word!r}; expected one of {', '.join(labels)}"
    return f"no metric {word!r}; expected one of {', '.join(metrics)}"
