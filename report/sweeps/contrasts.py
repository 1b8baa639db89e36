"""Labels against the first one of their workload: ratios at equal loads and at equal interactivity, with intervals."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, floor, isnan, log, log10, sqrt
from statistics import mean, stdev
from typing import Final

import numpy as np
import numpy.typing as npt

from measure.quantiles import quantile_place
from measure.resampling import FEWEST_UNITS, draw_weights, interval, t_quantile
from report.sweeps.inputs import SweptRun
from report.sweeps.pareto import XY, frontier, height_at
from report.sweeps.points import Repeats, values_of
from report.sweeps.results import Contrast, LoadKind, PointContrast, Ratio
from report.sweeps.samples import RATIOS, draws_of
from tracefile.records.arrays import FloatArray

MOST_LOST: Final = 0.1
"""Share of draws without a value above which there is no interval."""


@dataclass(slots=True)
class _Draws:
    """Metrics of the runs of two labels, and draws of them; sessions of one name are drawn for all or for none."""

    kind: LoadKind
    weights: npt.NDArray[np.uint16]
    numbers: Mapping[str, int]
    by_run: dict[int, dict[str, FloatArray]] = field(default_factory=dict)

    def values(self, runs: Sequence[SweptRun], metric: str) -> list[float] | None:
        """Return a metric of each run. Null: a run does not tell it."""
        found = [values_of(run.metrics, self.kind)[metric] for run in runs]
        known = [one for one in found if one is not None]
        return known if len(known) == len(found) else None

    def median(self, runs: Sequence[SweptRun], metric: str) -> float | None:
        found = self.values(runs, metric)
        return sorted(found)[quantile_place(0.5, len(found))] if found else None

    def drawn(self, runs: Sequence[SweptRun], metric: str) -> FloatArray | None:
        """Return the repeats' median in every draw. Null: a run does not tell the metric."""
        found = [one for run in runs if (one := self._of(run).get(metric)) is not None]
        return np.sort(found, axis=0)[quantile_place(0.5, len(found))] if len(found) == len(runs) else None

    def _of(self, run: SweptRun) -> dict[str, FloatArray]:
        if id(run) not in self.by_run:
            units = np.array([self.numbers[name] for name in run.sample.sessions], np.int64)
            found = draws_of(run.sample, units, self.weights)
            # The rate that a run was given sets its throughput: other sessions in it would change nothing.
            share = found["throughput_tps"] if self.kind == "parallel" else np.ones(len(self.weights))
            found["throughput_tps"] = share * (values_of(run.metrics, self.kind)["throughput_tps"] or 0.0)
            self.by_run[id(run)] = found
        return self.by_run[id(run)]


@dataclass(frozen=True, slots=True)
class Side:
    """A label and its runs."""

    label: str
    repeats: Repeats


def contrast(ours: Side, base: Side, kind: LoadKind, draws: int, seed: int) -> Contrast:
    """Compare a label with another."""
    mine, theirs = ours.repeats, base.repeats
    numbers: dict[str, int] = {}
    for run in _runs(mine, theirs):
        for name in run.sample.sessions:
            numbers.setdefault(name, len(numbers))
    drawn = _Draws(kind, draw_weights(len(numbers), draws, seed), numbers)
    x = _meeting(_medians(mine, drawn), _medians(theirs, drawn))
    return Contrast(
        label=ours.label,
        against=base.label,
        points=[
            PointContrast(
                load=load, own_load=own, ratios={name: _ratio(name, mine[own], theirs[load], drawn) for name in RATIOS}
            )
            for own, load in _equal_loads(mine, theirs, kind)
        ],
        interactivity_tps=x,
        throughput=None if x is None else _throughput_at(x, mine, theirs, drawn),
    )


def _runs(*sides: Repeats) -> Iterator[SweptRun]:
    return (run for side in sides for runs in side.values() for run in runs)


def _equal_loads(mine: Repeats, theirs: Repeats, kind: LoadKind) -> list[tuple[float, float]]:
    """Return loads of both sides, pair by pair; measured loads pair in order if their numbers of requests agree."""
    if kind != "in_flight":
        return [(load, load) for load in sorted(theirs) if load in mine]
    pairs = list(zip(sorted(mine), sorted(theirs), strict=False))
    alike = all(mine[own][0].metrics.requests.n == theirs[load][0].metrics.requests.n for own, load in pairs)
    return pairs if alike and len(mine) == len(theirs) else []


def _ratio(name: str, mine: Sequence[SweptRun], theirs: Sequence[SweptRun], drawn: _Draws) -> Ratio | None:
    own, others = drawn.values(mine, name), drawn.values(theirs, name)
    if not own or not others or min(*own, *others) <= 0:
        return None
    value = (drawn.median(mine, name) or 0.0) / (drawn.median(theirs, name) or 1.0)
    if max(len(own), len(others)) > 1:
        return ratio_of_repeats(value, own, others)
    if name == "throughput_tps" and drawn.kind != "parallel":
        return Ratio(value=value, by=None, units=1)
    return _ratio_of_draws(value, drawn.drawn(mine, name), drawn.drawn(theirs, name), [*mine, *theirs], drawn.kind)


def ratio_of_repeats(value: float, ours: Sequence[float], others: Sequence[float]) -> Ratio:
    """Return a ratio with the t interval of that of the geometric means, from positive values.

    Repeat by repeat if both sides have two or more; of one repeated side alone, its spread is taken for both.
    """
    logs = [[log(one) for one in side] for side in (ours, others)]
    if min(map(len, logs)) > 1:
        apart = [one - other for one, other in zip(*logs, strict=False)]
        middle, freedom, error = mean(apart), len(apart) - 1, stdev(apart) / sqrt(len(apart))
    else:
        middle, freedom = mean(logs[0]) - mean(logs[1]), len(ours) + len(others) - 2
        error = stdev(logs[0] if len(ours) > 1 else logs[1]) * sqrt(1 / len(ours) + 1 / len(others))
    reach = t_quantile(freedom) * error
    paired = min(map(len, logs)) > 1
    return Ratio(
        value=value,
        low=exp(middle - reach),
        high=exp(middle + reach),
        by="repeats" if paired else "runs",
        units=freedom + (1 if paired else 2),
    )


def _ratio_of_draws(
    value: float, ours: FloatArray | None, others: FloatArray | None, runs: Sequence[SweptRun], kind: LoadKind
) -> Ratio:
    """Return the ratio with the interval of its draws.

    None under 8 sessions. In an open loop, nor under 8 busy periods: the sessions of one queue stand and fall together.
    A closed loop has a queue by design, and sessions that take its slots in turn.
    """
    sessions = min(len(run.sample.sessions) for run in runs)
    units = sessions if kind == "parallel" else min(run.sample.busy_periods for run in runs)
    plain = Ratio(value=value, by=None, units=sessions)
    if ours is None or others is None or units < FEWEST_UNITS or not len(ours):
        return plain
    with np.errstate(divide="ignore", invalid="ignore"):
        found = ours / others
    found = np.where(np.isfinite(found), found, np.nan)
    if np.isnan(found).mean() > MOST_LOST:
        return plain
    low, high = interval(found)
    return Ratio(value=value, low=float(low), high=float(high), by="sessions", units=sessions)


AXES: Final = ("interactivity_tps", "throughput_tps")


def _medians(repeats: Repeats, drawn: _Draws) -> list[XY]:
    found = ([drawn.median(runs, name) for name in AXES] for runs in repeats.values())
    return [(x, y) for x, y in found if x is not None and y is not None]


def _meeting(mine: Sequence[XY], theirs: Sequence[XY]) -> float | None:
    """Return an interactivity in the middle of both frontiers' ranges, in two digits if such is in both."""
    ends = [frontier(mine), frontier(theirs)]
    if not all(ends):
        return None
    low, high = max(one[0][0] for one in ends), min(one[-1][0] for one in ends)
    if low > high or low <= 0:
        return None
    middle = sqrt(low * high)
    digits = 1 - floor(log10(middle))
    return round(middle, digits) if low <= round(middle, digits) <= high else middle


def _throughput_at(x: float, mine: Repeats, theirs: Repeats, drawn: _Draws) -> Ratio | None:
    own, other = (height_at(frontier(_medians(side, drawn)), x) for side in (mine, theirs))
    if not own or not other:
        return None
    repeats = [_heights(x, side, drawn) for side in (mine, theirs)]
    if max(map(len, repeats)) > 1 and all(None not in heights for heights in repeats):
        return ratio_of_repeats(own / other, *([height or 0.0 for height in heights] for heights in repeats))
    ours, others = (_drawn_heights(x, side, drawn) for side in (mine, theirs))
    return _ratio_of_draws(own / other, ours, others, list(_runs(mine, theirs)), drawn.kind)


def _heights(x: float, side: Repeats, drawn: _Draws) -> list[float | None]:
    """Return the frontier's height in each repeat that all loads have."""
    repeats = min(len(runs) for runs in side.values())
    by_repeat = [_medians({load: [runs[at]] for load, runs in side.items()}, drawn) for at in range(repeats)]
    return [height_at(frontier(points), x) for points in by_repeat]


def _drawn_heights(x: float, repeats: Repeats, drawn: _Draws) -> FloatArray | None:
    """Return the frontier's height in every draw; NaN: the draw does not reach ``x``."""
    found = [[drawn.drawn(runs, name) for name in AXES] for runs in repeats.values()]
    known = [np.stack([one, other], 1) for one, other in found if one is not None and other is not None]
    if not known:
        return None
    heights = (
        height_at(frontier([(a, b) for a, b in draw.tolist() if not isnan(a + b)]), x) for draw in np.stack(known, 1)
    )
    return np.array([np.nan if height is None else height for height in heights])
