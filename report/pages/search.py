"""A search: its records, exactly as ``sim search --json`` writes them, and the same as lines for a terminal."""

from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec

from measure import wording
from measure.cohorts import cohort_title
from measure.table import table_lines
from report.compare.results import Metric
from report.pages.whatif import NOT_TRUSTED, Span, span_text

SCHEMA: Final = "kvtape-search/1"
Quantity = Literal["num-gpu-blocks", "replicas", "rate", "host-blocks"]
Outcome = Literal["found", "all hold", "none holds", "interrupted"]
"""``all hold``: the hardest value in range does; ``none holds``: the easiest value does not."""


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """A value of the searched quantity, forecast."""

    value: float
    latency: Span
    """The target's percentile over the members."""
    share: float
    holds: bool
    """Enough members keep the limit, and the load is not saturated: then waits depend on its length alone."""
    hit_rate: float
    utilization: float | None
    saturated: bool
    warnings: list[str]
    """Conditions that no capture showed."""


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """A whole search."""

    schema: Literal["kvtape-search/1"] = SCHEMA
    trace: str
    trace_digest: str
    model_digest: str
    verdict: str
    """Validation of the model, on this trace or another, and its error on this very capture."""
    trusted: bool = True
    """False: that error is larger than the gates' limits."""
    quantity: Quantity
    target: str
    """As given: ``turns2+.ttft.p90<=500ms``."""
    metric: Metric
    percentile: float
    """Between 0 and 1."""
    limit_ms: float
    cohort: str
    confidence: float
    low: float
    high: float
    tolerance: float
    scenario: str
    members: int
    seed: int
    paced: bool
    requests: int
    outcome: Outcome
    answer: float | None
    """The smallest or the largest value that holds with every evaluated value on its safe side. Null: none."""
    evaluated: list[Evaluated]
    notes: list[str]
    assumptions: list[str] = []
    """Of the tiers, workers and GPUs: nothing here could confirm them."""


def describe(found: Search) -> str:
    lines = [answer_sentence(found), found.verdict, *(f"note: {note}" for note in found.notes), ""]
    lines += table_lines(headings(found), [cells(found, one) for one in found.evaluated], gap="   ")
    lines += [f"warning: {warning}" for warning in answer_warnings(found)]
    lines += [f"assumed: {one}" for one in found.assumptions]
    return "\n".join(lines)


def answer_sentence(found: Search) -> str:
    target = f"{found.target} ({cohort_title(found.cohort).lower()}, n = {found.requests:,})"
    sure = f"with {found.confidence:.0%} confidence"
    which = "highest" if found.quantity == "rate" else "smallest"
    if found.outcome == "interrupted":
        return f"interrupted: no answer yet for {target} {sure}"
    if found.answer is None:
        if all(one.saturated for one in found.evaluated):
            return (
                f"not reachable: {target} holds at no {found.quantity} between {value(found, found.low)} and "
                f"{value(found, found.high)}: {_overload(found.evaluated)}"
            )
        best = max(found.evaluated, key=lambda one: (one.share, -(one.latency.middle or float("inf"))))
        return (
            f"not reachable: {target} {sure} holds at no {found.quantity} between {value(found, found.low)} and "
            f"{value(found, found.high)}; the best is {value(found, best.value)}: {best.share:.0%} of the members "
            f"within, {span_text(best.latency, wording.duration_ms)} ms"
        )
    said = f"{which} {found.quantity} for {target} {sure}: {value(found, found.answer)}"
    said += "" if found.trusted else NOT_TRUSTED
    if found.outcome == "all hold":
        said += ", the end of what was asked: it may hold beyond (--between)"
    limit = _stopped_by_load(found)
    return said if limit is None else f"{said}, where the load reaches what the engine can do: {_overload([limit])}"


def _stopped_by_load(found: Search) -> Evaluated | None:
    """Return the next harder value if it fails by its load alone."""
    harder = [one for one in found.evaluated if (one.value < (found.answer or 0.0)) == (found.quantity != "rate")]
    others = (one for one in harder if one.value != found.answer)
    beside = min(others, key=lambda one: abs(one.value - (found.answer or 0.0)), default=None)
    return beside if beside is not None and beside.saturated and beside.share >= found.confidence else None


def _overload(saturated: Sequence[Evaluated]) -> str:
    least = min(one.utilization or 0.0 for one in saturated)
    return f"at {least:.0%} and more waits grow for as long as the load lasts"


def answer_warnings(found: Search) -> list[str]:
    return next((one.warnings for one in found.evaluated if one.value == found.answer), [])


def percentile_name(found: Search) -> str:
    return f"{found.metric.upper()} p{found.percentile * 100:g}"


def headings(found: Search) -> list[str]:
    return [found.quantity, f"{percentile_name(found)} ms", "members within", "hit rate", "utilization", ""]


def cells(found: Search, one: Evaluated) -> list[str]:
    return [
        value(found, one.value),
        span_text(one.latency, wording.duration_ms),
        f"{one.share:.0%}",
        f"{one.hit_rate:.1%}",
        "–" if one.utilization is None else f"{one.utilization:.0%}",
        " ".join(_marks(found, one)),
    ]


def value(found: Search, number: float) -> str:
    return f"×{number:g}" if found.quantity == "rate" else f"{number:,.0f}"


def _marks(found: Search, one: Evaluated) -> Iterator[str]:
    yield "holds" if one.holds else "saturated" if one.saturated else "fails"
    if one.value == found.answer:
        yield "← answer" if found.trusted else "← answer, not to be trusted"
