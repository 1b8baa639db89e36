"""Drift of an engine over the windows of rolling fits: where its pace or a parameter changed."""

from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec
import numpy as np

from measure.changes import Change, Series, find_changes
from measure.fitindex import Estimate, FittedWindow
from measure.table import TextTable
from measure.wording import NOTHING, listed

PACE: Final = "pace"
MOST_NAMED: Final = 3


class SaidChange(msgspec.Struct, frozen=True, kw_only=True):
    """A step of one number, beyond what the windows' intervals and their usual drift explain."""

    number: str
    """``pace``, or a parameter that the windows identify."""
    window: str
    """First window after it, or the window that it falls into."""
    within: bool
    """True: it falls into the window, whose own fit mixes both levels."""
    ratio: float
    """Level after it over the level before, by up to four windows on each side."""
    low: float
    """Interval of 95 %."""
    high: float
    score: float
    """Step over its error; a change has at least ``threshold``."""
    threshold: float


class DriftPage(msgspec.Struct, frozen=True, kw_only=True):
    """Result of ``report drift``."""

    schema: Literal["kvtape-drift/1"] = "kvtape-drift/1"
    headline: list[str]
    changes: list[SaidChange]
    windows: list[FittedWindow]


def make_page(windows: Sequence[FittedWindow]) -> DriftPage:
    drift = max((window.lender_drift_log_sd for window in windows), default=0.0)
    changes = [_said(one, windows) for one in find_changes(list(_series(windows)), drift)]
    return DriftPage(headline=list(_headline(windows, changes)), changes=changes, windows=list(windows))


def numbers_of(window: FittedWindow) -> dict[str, Estimate]:
    """Return a window's pace and parameters by name."""
    return ({} if window.pace is None else {PACE: window.pace}) | window.parameters


def _series(windows: Sequence[FittedWindow]) -> Iterator[Series]:
    """Yield numbers that windows tell of themselves: no borrowed one, whose only news is the pace."""
    numbers = [numbers_of(window) for window in windows]
    for name in dict.fromkeys(name for one in numbers for name in one):
        told = {place: one[name] for place, one in enumerate(numbers) if name in one and _tells(one[name])}
        yield Series(
            name,
            list(told),
            *(np.array([getattr(one, end) for one in told.values()], np.float64) for end in ("value", "low", "high")),
        )


def _tells(one: Estimate) -> bool:
    return one.state == "identified" and one.value > 0.0 and one.low is not None and one.high is not None


def _said(change: Change, windows: Sequence[FittedWindow]) -> SaidChange:
    return SaidChange(
        number=change.name,
        window=windows[change.place].window,
        within=change.within,
        ratio=round(change.ratio, 4),
        low=round(change.low, 4),
        high=round(change.high, 4),
        score=round(change.score, 1),
        threshold=round(change.threshold, 1),
    )


def _headline(windows: Sequence[FittedWindow], changes: Sequence[SaidChange]) -> Iterator[str]:
    fitted = [window for window in windows if window.status == "fitted"]
    for name in dict.fromkeys(change.window for change in changes):
        own = [change for change in changes if change.window == name]
        own.sort(key=lambda change: change.number != PACE)
        more = f", and {len(own) - MOST_NAMED} more" if len(own) > MOST_NAMED else ""
        named = listed([_sentence(change) for change in own[:MOST_NAMED]])
        yield f"{_when(own[0])}: {named}{more}{_error(name, windows)}."
    if not changes:
        yield f"No change beyond the intervals and the usual drift in {len(fitted)} windows."
    if skipped := len(windows) - len(fitted):
        yield f"{skipped} of {len(windows)} windows were skipped."


def _when(change: SaidChange) -> str:
    return f"Changed within {change.window}" if change.within else f"Changed from {change.window} on"


def _sentence(change: SaidChange) -> str:
    name = "steps took" if change.number == PACE else change.number
    return f"{name} × {change.ratio:.3f} (95 % interval {change.low:.3f} to {change.high:.3f})"


def _error(name: str, windows: Sequence[FittedWindow]) -> str:
    """Return the error there of the model of the window before, beside the usual one."""
    errors = {window.window: window.errors["before"].median_abs for window in windows if "before" in window.errors}
    if name not in errors:
        return ""
    return (
        f"; the model of the window before missed TTFT by {errors[name]:.0%} at the median, "
        f"in the middle window by {float(np.median(list(errors.values()))):.0%}"
    )


def windows_table(page: DriftPage) -> TextTable:
    """Return the windows' pace and prediction error; a star: something changed."""
    changed = {change.window for change in page.changes}
    rows = []
    for window in page.windows:
        star = " *" if window.window in changed else ""
        lent = sum(one.state == "borrowed" for one in window.parameters.values())
        pace = NOTHING if window.pace is None else _with_interval(window.pace)
        error = window.errors.get("before")
        off = NOTHING if error is None else f"{error.median_abs:.1%}"
        note = window.reason or (f"{lent} of {len(window.parameters)} parameters borrowed" if lent else "")
        rows.append([window.window + star, f"{window.requests:,}", pace, off, note])
    return TextTable(["window", "requests", "pace", "TTFT off, model before", "note"], rows)


def parameters_table(page: DriftPage, name: str) -> TextTable:
    """Return a number by window, with its interval and its origin."""
    rows = [
        [window.window, _with_interval(one), one.state]
        for window in page.windows
        if (one := numbers_of(window).get(name)) is not None
    ]
    return TextTable(["window", name, "from"], rows)


def _with_interval(one: Estimate) -> str:
    ends = "" if one.low is None or one.high is None else f" ({one.low:.4g} … {one.high:.4g})"
    return f"{one.value:.4g}{ends}"


def drift_lines(page: DriftPage) -> Iterator[str]:
    """Yield the headline and a table of the windows."""
    yield from (*page.headline, "", *windows_table(page).lines)
    if page.changes:
        yield "*: something changed"
