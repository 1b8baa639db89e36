"""Goals of the matrix as numbers: each goal, its result, and the cells that miss it."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median

import msgspec

from scripts.fidelity.judging import LEVELS, Cell

BELOW_SATURATION = {"p50": 0.05, "p90": 0.10, "p99": 0.15}
SATURATED_P50 = 0.15
CACHED_EXACT = 0.99
COVERAGE = 0.85
BASELINE_CELL = 100
STEADY = 0.10
"""Where the engine's own steps took so much more or less than when it was calibrated, no forecast is asked of it."""


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
    steady = [cell for cell in below if abs(cell.pace.steps - 1.0) <= STEADY]
    kept = f"below saturation, steps within {STEADY:.0%} of the model's"
    found += [_quantile_goal(steady, level, limit, kept) for level, limit in BELOW_SATURATION.items()]
    found.append(_saturated(cells))
    found.append(_cached([cell for cell in cells if not cell.preemptions]))
    found.append(_coverage(cells))
    return [*found, *_baselines([cell for cell in cells if cell.n >= BASELINE_CELL])]


def name_of(cell: Cell) -> str:
    """A cell in a word or two."""
    way = "" if cell.way == "warm" else f" {cell.way}"
    cohort = "" if cell.cohort == "all" else f" {cell.cohort}"
    return f"{cell.shape} {cell.load}{way}{cohort}"


def _quantile_goal(cells: Sequence[Cell], level: str, limit: float, where: str = "below saturation") -> Goal:
    """The median of absolute errors; an error inside A/A is none."""
    known = {name_of(cell): cell.quantiles[level] for cell in cells if cell.quantiles[level].error is not None}
    off = {name: abs(one.error or 0.0) for name, one in known.items()}
    missed = [name for name, error in off.items() if error > limit and not known[name].inside_aa]
    middle = median(off.values()) if off else 0.0
    return Goal(
        goal=f"{where}, median error of {level} ≤ {limit:.0%}",
        found=f"{middle:.1%} over {len(off)} cells; {len(off) - len(missed)} within it or inside A/A",
        met=middle <= limit if off else None,
        missed_in=missed,
    )


def _saturated(cells: Sequence[Cell]) -> Goal:
    known = [cell for cell in cells if cell.saturated and cell.quantiles["p50"].error is not None]
    missed = [name_of(cell) for cell in known if abs(cell.quantiles["p50"].error or 0.0) > SATURATED_P50]
    return Goal(
        goal=f"in saturation, error of p50 ≤ {SATURATED_P50:.0%}",
        found=f"{len(known) - len(missed)} of {len(known)} cells",
        met=not missed if known else None,
        missed_in=missed,
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


_YARDSTICKS: dict[str, Callable[[Cell], float | None]] = {
    "p50": lambda cell: abs(error) if (error := cell.quantiles["p50"].error) is not None else None,
    "w1_ms": lambda cell: cell.w1_ms,
}


def _baselines(cells: Sequence[Cell]) -> Iterator[Goal]:
    """Each baseline in every large cell, by the distance of the whole curve and by the median."""
    for baseline in dict.fromkeys(name for cell in cells for name in cell.baselines):
        for key, of in _YARDSTICKS.items():
            pairs = [(name_of(cell), of(cell), getattr(cell.baselines[baseline], key)) for cell in cells]
            known = [(name, ours, theirs) for name, ours, theirs in pairs if ours is not None and theirs is not None]
            missed = [name for name, ours, theirs in known if ours >= theirs]
            measure = key.removesuffix("_ms").replace("w1", "W1")
            yield Goal(
                goal=f"closer than {baseline.replace('_', ' ')} by {measure}, n ≥ {BASELINE_CELL}",
                found=f"{len(known) - len(missed)} of {len(known)} cells",
                met=not missed if known else None,
                missed_in=missed,
            )
