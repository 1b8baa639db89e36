"""Thresholds of gates, searches and SLOs, ``[LABEL.][COHORT.]metric[.pNN][.key]<=LIMIT``: a duration, % or number."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from measure.cohorts import known_cohorts
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
    """Return if noise larger than a limit hides on which side of it a value is: no verdict but ``TOO_UNCERTAIN``."""
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
_REST: Final = re.compile(r"(?:\.p(?P<percentile>\d{1,2}(?:\.\d+)?))?(?:\.(?P<key>(?!p\d)[a-z]\w*))?")


@dataclass(frozen=True, slots=True)
class Threshold:
    """Limit on a value."""

    text: str
    """The threshold as written, without the spaces around it."""
    label: str | None
    """None: every label that is judged."""
    cohort: str | None
    """None: all requests."""
    metric: str
    percentile: float | None
    """Above 0 and below 100."""
    key: str | None
    """A figure of the metric or of its percentile, such as ``error``; None: the value itself."""
    op: str
    limit: float
    """In ms, as a fraction, or a plain number, as ``unit`` says."""
    unit: Unit

    def holds(self, value: float) -> bool:
        return bool(_OPERATORS[self.op](value, self.limit))

    def holds_each(self, values: "FloatArray") -> "BoolArray":
        """Return if each value holds; NaN does not."""
        held: BoolArray = _OPERATORS[self.op](values, self.limit)
        return held


def parse_threshold(flag: str, text: str, *, metrics: Sequence[str], labels: Sequence[str] = ()) -> Threshold:
    """Read a threshold on one of ``metrics``, after the longest fitting label; raises InputError naming the flag."""
    text = text.strip()
    found = _THRESHOLD.fullmatch(text)
    if found is None:
        raise InputError(f"{flag} {text}: not a threshold; expected [LABEL.][COHORT.]metric.pNN<=LIMIT, as {EXAMPLE}")
    path = found["path"]
    label = _longest_prefix(path, labels)
    path = path if label is None else path[len(label) + 1 :]
    cohort = _longest_prefix(path, known_cohorts())
    path = path if cohort is None else path[len(cohort) + 1 :]
    metric = next((name for name in metrics if path == name or path.startswith(f"{name}.")), None)
    if metric is None:
        raise InputError(f"{flag} {text}: {_unknown_word(path, label, cohort, metrics, labels)}")
    rest = _REST.fullmatch(path[len(metric) :])
    if rest is None or (rest["percentile"] is not None and float(rest["percentile"]) == 0.0):
        raise InputError(
            f"{flag} {text}: {path[len(metric) + 1 :]!r}; expected pNN, a key, or pNN.key, as in {EXAMPLE}"
        )
    unit, factor = _UNITS[found["unit"]]
    return Threshold(
        text=text,
        label=label,
        cohort=cohort,
        metric=metric,
        percentile=None if rest["percentile"] is None else float(rest["percentile"]),
        key=rest["key"],
        op=found["op"],
        limit=float(found["limit"]) * factor if factor >= 1.0 else float(found["limit"]) / 100.0,
        unit=unit,
    )


def _longest_prefix(path: str, names: Sequence[str]) -> str | None:
    return max((name for name in names if path.startswith(f"{name}.")), key=len, default=None)


def _unknown_word(
    path: str, label: str | None, cohort: str | None, metrics: Sequence[str], labels: Sequence[str]
) -> str:
    """The first word of the path that is none of label, cohort or metric, and the words that could stand there."""
    word, _, rest = path.partition(".")
    next_word = rest.partition(".")[0]
    if cohort is None and next_word in metrics and not (label is None and labels):
        return f"no cohort {word!r}; expected one of {', '.join(known_cohorts())}"
    if label is None and labels and (next_word in metrics or _longest_prefix(rest, known_cohorts())):
        return f"no compared label {word!r}; expected one of {', '.join(labels)}"
    return f"no metric {word!r}; expected one of {', '.join(metrics)}"
