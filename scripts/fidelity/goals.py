"""Goals of the matrix as numbers: each goal, its result, and the cells that miss it."""

from collections.abc import Iterator, Sequence
from itertools import product
from statistics import median

import msgspec

from report.compare.baselines import BASELINE_CELL
from scripts.fidelity.judging import LEVELS, Cell

BELOW_SATURATION = {"p50": 0.05, "p90": 0.10, "p99": 0.15}
SATURATED_P50 = 0.15
CACHED_EXACT = 0.99
COVERAGE = 0.85
MEASURES = {"p50": "p50", "p90": "p90", "p99": "p99", "w1_ms": "W1"}
"""Errors that a forecast and a baseline are compared by, as tables name them."""


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """Goal over all the cells that it concerns."""

    goal: str
    found: str
    met: bool | None
    """Null: no cell is of its kind."""
    missed_in: list[str]
    """The cells that keep it from being met, or fail it by themselves."""


def goals(cells: Sequence[Cell]) -> list[Goal]:
    """All goals, in the order of the tables."""
    below = [cell for cell in cells if not cell.saturated]
    found = [_quantile_goal(below, level, limit) for level, limit in BELOW_SATURATION.items()]
    whole = [cell for cell in below if not cell.quantiles["p99"].thin]
    found.append(_quantile_goal(whole, "p99", BELOW_SATURATION["p99"], "below saturation, n ≥ 100"))
    found.append(_saturated(cells))
    found.append(_gates(cells))
    found.append(_cached([cell for cell in cells if not cell.preemptions]))
    found.append(_coverage(cells))
    return [*found, *_baselines([cell for cell in cells if cell.n >= BASELINE_CELL])]


def name_of(cell: Cell) -> str:
    """A cell in a word or two."""
    way = "" if cell.way == "warm" else f" {cell.way}"
    cohort = "" if cell.cohort == "all" else f" {cell.cohort}"
    return f"{cell.shape} {cell.load}{way}{cohort}"


def _quantile_goal(cells: Sequence[Cell], level: str, limit: float, where: str = "below saturation") -> Goal:
    """The median of |errors|, with the cells that miss the limit and the worst of them."""
    known = {name_of(cell): error for cell in cells if (error := cell.quantiles[level].judged_error) is not None}
    missed = [name for name, error in known.items() if error > limit]
    middle = median(known.values()) if known else 0.0
    worst = max(known, key=known.__getitem__, default="")
    return Goal(
        goal=f"{where}, median error of {level} ≤ {limit:.0%}",
        found=f"{middle:.1%} over {len(known)} cells; {len(known) - len(missed)} within it"
        + (f"; worst {known[worst]:.0%}, {worst}" if known else ""),
        met=middle <= limit if known else None,
        missed_in=missed,
    )


def _saturated(cells: Sequence[Cell]) -> Goal:
    known = [cell for cell in cells if cell.saturated and cell.quantiles["p50"].judged_error is not None]
    missed = [name_of(cell) for cell in known if (cell.quantiles["p50"].judged_error or 0.0) > SATURATED_P50]
    return Goal(
        goal=f"in saturation, error of p50 ≤ {SATURATED_P50:.0%}",
        found=f"{len(known) - len(missed)} of {len(known)} cells",
        met=not missed if known else None,
        missed_in=missed,
    )


def _gates(cells: Sequence[Cell]) -> Goal:
    """Forecasts by the product's own default gates; one forecast may have several cells."""
    forecasts = {(cell.shape, cell.load, cell.way): cell for cell in cells}.values()
    failed = [cell for cell in forecasts if cell.failed_gates]
    return Goal(
        goal="forecasts that pass all default gates",
        found=f"{len(forecasts) - len(failed)} of {len(forecasts)}",
        met=not failed if forecasts else None,
        missed_in=[f"{cell.shape} {cell.load} {cell.way}: {', '.join(cell.failed_gates)}" for cell in failed],
    )


def _cached(cells: Sequence[Cell]) -> Goal:
    known = [cell for cell in cells if cell.cached_exact is not None and cell.cached_n]
    requests = sum(cell.cached_n for cell in known)
    exact = sum(round(cell.cached_n * (cell.cached_exact or 0.0)) for cell in known)
    missed = [name_of(cell) for cell in known if (cell.cached_exact or 0.0) < CACHED_EXACT]
    return Goal(
        goal=f"cached tokens exact for ≥ {CACHED_EXACT:.0%} of requests where nothing is preempted",
        found=f"{exact:,} of {requests:,}" + (f" ({exact / requests:.1%})" if requests else ""),
        met=exact >= CACHED_EXACT * requests if requests else None,
        missed_in=missed,
    )


def _coverage(cells: Sequence[Cell]) -> Goal:
    bands = [
        (name_of(cell), level, cell.quantiles[level].inside_band)
        for cell in cells
        for level in LEVELS
        if cell.quantiles[level].inside_band is not None
    ]
    inside = sum(bool(held) for _, _, held in bands)
    return Goal(
        goal=f"90 % bands hold ≥ {COVERAGE:.0%} of captured quantiles",
        found=f"{inside} of {len(bands)}" + (f" ({inside / len(bands):.0%})" if bands else ""),
        met=inside >= COVERAGE * len(bands) if bands else None,
        missed_in=[f"{name} {level}" for name, level, held in bands if not held],
    )


def _baselines(cells: Sequence[Cell]) -> Iterator[Goal]:
    """Each baseline in every large cell, by quantiles and by the distance of the whole curve."""
    for baseline in dict.fromkeys(name for cell in cells for name in cell.baselines):
        won, missed = dict[str, list[bool]](), list[str]()
        for cell, measure in product(cells, MEASURES):
            ours, theirs = _error(cell, measure), getattr(cell.baselines.get(baseline), measure, None)
            if ours is None or theirs is None:
                continue
            won.setdefault(measure, []).append(ours < theirs)
            if ours >= theirs:
                missed.append(f"{name_of(cell)} {MEASURES[measure]}")
        yield Goal(
            goal=f"closer than {baseline.replace('_', ' ')}, n ≥ {BASELINE_CELL}",
            found=", ".join(f"{MEASURES[name]} {sum(held)} of {len(held)}" for name, held in won.items()),
            met=not missed if won else None,
            missed_in=missed,
        )


def _error(cell: Cell, measure: str) -> float | None:
    if measure == "w1_ms":
        return cell.w1_ms
    error = cell.quantiles[measure].error
    return None if error is None else abs(error)
