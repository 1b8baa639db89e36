"""Changes of level in a series of estimates with intervals: steps that neither the intervals nor usual drift explain.

Each place between two windows is tested: the weighted means of up to four windows on each side differ, over the error
of that difference, by Student's t. Windows vary by their intervals and by a usual drift, which the typical step from
one window to the next tells. The largest step is taken first, and both sides are searched again. With all series of a
page together, one page in a hundred without any change is to show one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from measure.scores import ndtri, stdtrit
from tracefile.records.arrays import FloatArray

FALSE_ALARMS = 0.01
"""Share of pages without a change that may show one."""
SIDE = 4
"""Windows on each side that a step is between: far ones tell of slow drift."""
_FEWEST_FOR_DRIFT = 5
_OF_DRIFT, _OF_INTERVAL = 0.4, 7.0
"""Degrees of freedom for each window: of a typical step, and of an interval by eight parts of a window."""
_OF_EXPECTED = 2.0
"""Those of the drift to expect, which a lender's three captures tell."""
_CHANGES = 1 / 6
"""Share of steps, the largest, that are left out of the typical one: changes may be among them."""
_NORMAL = 1.959964


@dataclass(frozen=True, slots=True)
class Series:
    """Estimates of one number by window, positive."""

    name: str
    places: list[int]
    """Windows, ascending."""
    values: FloatArray
    lows: FloatArray
    highs: FloatArray

    @property
    def log_errors(self) -> FloatArray:
        """Standard errors of the logs; where the lower end is 0, by the upper one."""
        logs = np.log(self.values)
        above = np.log(np.maximum(self.highs, self.values)) - logs
        lows = np.where(self.lows > 0.0, self.lows, self.values * np.exp(-above))
        return np.asarray((above + logs - np.log(lows)) / (2.0 * _NORMAL))


@dataclass(frozen=True, slots=True)
class Change:
    """A step of one series."""

    name: str
    place: int
    """First window after it; of a step within a window, that window."""
    last_before: int
    """Last window before it that tells of the number."""
    within: bool
    ratio: float
    low: float
    """Interval of 95 % of the ratio."""
    high: float
    score: float
    """Step over its error."""
    threshold: float
    """Least score of a change on this page."""


def usual_drift(series: Series, expected: float) -> float:
    """Return the standard deviation of a window's log beyond its interval; of few windows the ``expected`` one.

    Else the mean of both variances by their degrees of freedom; 0: none is expected, and the windows alone tell.
    """
    if len(series.places) < _FEWEST_FOR_DRIFT:
        return expected
    own, weight = _own_drift_variance(series), _OF_DRIFT * len(series.places)
    prior = _OF_EXPECTED if expected > 0.0 else 0.0
    return float(np.sqrt((weight * own + prior * expected**2) / (weight + prior)))


def _own_drift_variance(series: Series) -> float:
    steps, variances = np.sort(np.abs(np.diff(np.log(series.values)))), series.log_errors**2
    kept = len(steps) - max(1, round(len(steps) * _CHANGES))
    share = kept / len(steps)
    end = float(ndtri((1.0 + share) / 2.0))
    density = np.exp(-(end**2) / 2.0) / np.sqrt(2.0 * np.pi)
    # Of a normal variable, the mean square of the smallest ``share`` of its values.
    typical = float(np.mean(steps[:kept] ** 2)) / (1.0 - 2.0 * end * density / share)
    return float(max(typical - float(np.median(variances[1:] + variances[:-1])), 0.0) / 2.0)


def find_changes(page: Sequence[Series], drift: float = 0.0) -> list[Change]:
    """Return the changes in all series, in order of time; ``drift``: the one to expect, as a lender tells it."""
    tests = sum(max(len(series.places) - 1, 0) for series in page)
    found = list[Change]()
    for series in page:
        if len(series.places) > 1:
            usual = usual_drift(series, drift)
            freedom = _freedom(series, usual)
            threshold = float(stdtrit(freedom, 1.0 - FALSE_ALARMS / tests / 2.0))
            found += _Steps(series, usual, threshold, float(stdtrit(freedom, 0.975))).changes()
    return sorted(_together(found), key=lambda one: (one.place, -abs(one.score)))


def _together(found: Sequence[Change]) -> Iterator[Change]:
    """Yield changes; one that lies over windows without its number, at another's place among them."""
    places = {one.place for one in found if one.place == one.last_before + 1}
    for one in found:
        inside = [place for place in places if one.last_before < place < one.place]
        yield replace(one, place=inside[0]) if len(inside) == 1 else one


def _freedom(series: Series, drift: float) -> float:
    """Degrees of freedom of a step's error, by the drift's share of its variance (Satterthwaite).

    The expected drift's count even where none is told: without them half as many steps are found, and false alarms
    are as many, because they come of windows whose own drift looks like 0.
    """
    windows, own = len(series.places), float(np.median(series.log_errors**2))
    share = drift**2 / max(drift**2 + own, 1e-12)
    drifts, intervals = _OF_DRIFT * windows + _OF_EXPECTED, _OF_INTERVAL * windows
    return 1.0 / (share**2 / drifts + (1.0 - share) ** 2 / intervals)


@dataclass(frozen=True, slots=True)
class _Steps:
    series: Series
    drift: float
    threshold: float
    two_sided: float

    def changes(self) -> Iterator[Change]:
        edges = [0, *sorted(self._splits(0, len(self.series.places))), len(self.series.places)]
        number = 1
        while number < len(edges) - 1:
            first, at, last = edges[number - 1 : number + 2]
            after = last
            # A window that a change falls into lies between the levels of both sides.
            lies_between = last - at == 1 and number + 2 < len(edges) and self._is_between(first, at, edges[number + 2])
            if lies_between:
                at, after = last, edges[number + 2]
                number += 1
            step, error = self._step(first, at - lies_between, at, after)
            ratio, low, high = (float(np.exp(step + self.two_sided * error * end)) for end in (0.0, -1.0, 1.0))
            yield Change(
                name=self.series.name,
                place=self.series.places[at - lies_between],
                last_before=self.series.places[at - lies_between - 1],
                within=lies_between,
                ratio=ratio,
                low=low,
                high=high,
                score=abs(step) / error,
                threshold=self.threshold,
            )
            number += 1

    def _splits(self, first: int, last: int) -> Iterator[int]:
        scores = []
        for at in range(first + 1, last):
            step, error = self._step(first, at, at, last)
            scores.append((abs(step) / error, at))
        score, at = max(scores, default=(0.0, first))
        if score > self.threshold:
            yield from self._splits(first, at)
            yield at
            yield from self._splits(at, last)

    def _step(self, first: int, until: int, since: int, last: int) -> tuple[float, float]:
        """Return the step from windows before ``until`` to windows from ``since`` on, and its error."""
        before = self._mean(max(first, until - SIDE), until)
        after = self._mean(since, min(last, since + SIDE))
        return after[0] - before[0], float(np.sqrt(before[1] + after[1]))

    def _mean(self, first: int, last: int) -> tuple[float, float]:
        logs = np.log(self.series.values[first:last])
        weights = 1.0 / np.maximum(self.series.log_errors[first:last] ** 2 + self.drift**2, 1e-12)
        return float(weights @ logs / weights.sum()), 1.0 / float(weights.sum())

    def _is_between(self, first: int, at: int, last: int) -> bool:
        low, middle, high = self._mean(first, at)[0], self._mean(at, at + 1)[0], self._mean(at + 1, last)[0]
        return min(low, high) < middle < max(low, high)
