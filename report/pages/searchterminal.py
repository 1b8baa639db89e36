"""A search as a few lines: what was found, and every value that was tried, which is the curve."""

from collections.abc import Iterator

from measure import wording
from measure.cohorts import cohort_title
from report.pages.searchresults import Evaluated, Search
from report.pages.whatifterminal import span_text


def describe(found: Search) -> str:
    """The answer, the values tried in order, notes."""
    lines = [answer_sentence(found), *(f"note: {note}" for note in found.notes), ""]
    rows = [headings(found), *(cells(found, one) for one in found.evaluated)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["   ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"warning: {warning}" for warning in answer_warnings(found)]
    return "\n".join(lines)


def answer_sentence(found: Search) -> str:
    """What was found, or that nothing was, in a sentence."""
    target = f"TTFT {found.target} ({cohort_title(found.cohort).lower()}, n = {found.requests:,})"
    sure = f"with {found.confidence:.0%} confidence"
    which = "smallest" if found.quantity == "num-gpu-blocks" else "highest"
    if found.outcome == "interrupted":
        return f"interrupted: no answer yet for {target} {sure}"
    if found.answer is None:
        best = max(found.evaluated, key=lambda one: (one.share, -(one.ttft.middle or float("inf"))))
        return (
            f"not reachable: {target} {sure} holds at no {found.quantity} between {value(found, found.low)} and "
            f"{value(found, found.high)}; the best is {value(found, best.value)}: {best.share:.0%} of the members "
            f"within, {span_text(best.ttft, wording.duration_ms)} ms"
        )
    said = f"{which} {found.quantity} for {target} {sure}: {value(found, found.answer)}"
    if found.outcome == "all hold":
        said += ", the end of what was asked: it may hold beyond (--between)"
    return said


def answer_warnings(found: Search) -> list[str]:
    """Those of the answer, or of the best there is."""
    return next((one.warnings for one in found.evaluated if one.value == found.answer), [])


def headings(found: Search) -> list[str]:
    """Of the columns of ``cells``."""
    return [found.quantity, f"TTFT {found.target.partition('<')[0]} ms", "members within", "hit rate", "load", ""]


def cells(found: Search, one: Evaluated) -> list[str]:
    """A value that was tried, as a row."""
    return [
        value(found, one.value),
        span_text(one.ttft, wording.duration_ms),
        f"{one.share:.0%}",
        f"{one.hit_rate:.1%}",
        "–" if one.load is None else f"{one.load:.0%}",
        " ".join(_marks(found, one)),
    ]


def value(found: Search, number: float) -> str:
    """A count or a multiple."""
    return f"{number:,.0f}" if found.quantity == "num-gpu-blocks" else f"×{number:g}"


def _marks(found: Search, one: Evaluated) -> Iterator[str]:
    yield "holds" if one.holds else "fails"
    if one.saturated:
        yield "saturated"
    if one.value == found.answer:
        yield "← answer"
