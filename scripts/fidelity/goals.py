"""Goals of the matrix as numbers: each goal, its result, and the cells that miss it."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from statistics import median

import msgspec

from report.compare.ensembles import BASELINE_CELL
from scripts.fidelity.judging import LEVELS, Cell
from scripts.fidelity.steps import PREFILLS

BELOW_SATURATION = {"p50": 0.05, "p90": 0.10, "p99": 0.15}
AT_PACE = {"p50": 0.04, "p90": 0.07, "p99": 0.12}
AT_PACE_P99_REQUESTS = 300
SATURATED_P50 = 0.15
CACHED_EXACT = 0.99
COVERAGE = (0.85, 0.95)
STEPS_NEAR = 0.05
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


def rounds(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells by the tables of goals: all, those of later rounds, each model's and each round's own."""
    shapes = list(dict.fromkeys(cell.shape for cell in cells))
    later = [shape for shape in shapes if "-" in shape]
    groups = {"all": shapes, "later rounds": later if len(later) > 1 else [], **{shape: [shape] for shape in shapes}}
    wanted = {name: own for name, own in groups.items() if own and (name == "all" or own != shapes)}
    return {name: [cell for cell in cells if cell.shape in own] for name, own in wanted.items()}


def goals(cells: Sequence[Cell]) -> list[Goal]:
    """All goals, in the order of the tables."""
    below = [cell for cell in cells if not cell.saturated]
    found = [_quantile_goal(below, level, limit) for level, limit in BELOW_SATURATION.items()]
    whole = [cell for cell in below if not cell.quantiles["p99"].thin]
    found.append(_quantile_goal(whole, "p99", BELOW_SATURATION["p99"], "below saturation, n ≥ 100"))
    found.append(_saturated(cells))
    found.append(_gates(cells))
    found.append(_cached([cell for cell in cells if not cell.preemptions]))
    found.append(_coverage("90 % bands", _bands(cells)))
    found += _baselines([cell for cell in cells if cell.n >= BASELINE_CELL])
    return [*found, *_at_pace(below), _coverage("at pace, 90 % bands", _bands_at_pace(cells)), *_prefills(cells)]


def name_of(cell: Cell) -> str:
    """A cell in a word or two."""
    cohort = "" if cell.cohort == "all" else f" {cell.cohort}"
    return f"{_capture_of(cell)}{cohort}"


def _capture_of(cell: Cell) -> str:
    return f"{cell.shape} {cell.load}" + ("" if cell.way == "warm" else f" {cell.way}")


def _quantile_goal(cells: Sequence[Cell], level: str, limit: float, where: str = "below saturation") -> Goal:
    known = {name_of(cell): error for cell in cells if (error := cell.quantiles[level].judged_error) is not None}
    return _middle_goal(f"{where}, median error of {level} ≤ {limit:.0%}", known, limit)


def _middle_goal(goal: str, errors: Mapping[str, float], limit: float) -> Goal:
    """The median of |errors|, with those beyond the limit."""
    missed = {name: error for name, error in errors.items() if error > limit}
    middle = median(errors.values()) if errors else 0.0
    return Goal(
        goal=goal,
        found=f"{middle:.1%} ({len(errors) - len(missed)} of {len(errors)})" if errors else "–",
        met=middle <= limit if errors else None,
        missed_in=[f"{name} ({error:.1%})" for name, error in missed.items()],
    )


def _at_pace(below: Sequence[Cell]) -> Iterator[Goal]:
    """Yield the goals of forecasts at the captures' own pace, below saturation."""
    for level, limit in AT_PACE.items():
        least = AT_PACE_P99_REQUESTS if level == "p99" else 0
        errors = {name_of(cell): error for cell in below if (error := _paced_error(cell, level)) is not None}
        large = {name_of(cell) for cell in below if cell.n >= least}
        where = f"at pace, below saturation{f', n ≥ {least}' if least else ''}"
        own = {name: error for name, error in errors.items() if name in large}
        yield _middle_goal(f"{where}, median error of {level} ≤ {limit:.0%}", own, limit)
    yield _sessions(below)


def _paced_error(cell: Cell, level: str) -> float | None:
    error = cell.paced[level].error if level in cell.paced else None
    return None if error is None else abs(error)


def _sessions(below: Sequence[Cell]) -> Goal:
    """Loads of sessions, whose turns come after pauses, beside loads of single requests."""
    kinds = ([cell for cell in below if cell.load.startswith("session") is sessions] for sessions in (True, False))
    sessions, singles = ({level: _middle_at_pace(kind, level) for level in ("p50", "p90")} for kind in kinds)
    both = {
        level: (ours, theirs)
        for level, ours in sessions.items()
        if ours is not None and (theirs := singles[level]) is not None
    }
    return Goal(
        goal="at pace, below saturation, sessions with pauses no worse than single turns, median error",
        found=", ".join(f"{level} {ours:.1%} against {theirs:.1%}" for level, (ours, theirs) in both.items()) or "–",
        met=all(ours <= theirs for ours, theirs in both.values()) if both else None,
        missed_in=[level for level, (ours, theirs) in both.items() if ours > theirs],
    )


def _middle_at_pace(cells: Sequence[Cell], level: str) -> float | None:
    errors = [error for cell in cells if (error := _paced_error(cell, level)) is not None]
    return median(errors) if errors else None


def _prefills(cells: Sequence[Cell]) -> Iterator[Goal]:
    """Yield a goal for each kind of steps with prefill, over captures: their time over the model's at the pace."""
    captures = {_capture_of(cell): cell for cell in cells}
    for kind in PREFILLS:
        times = {
            name: cell.steps.prefills[kind] / cell.pace
            for name, cell in captures.items()
            if cell.pace is not None and kind in cell.steps.prefills
        }
        middle = median(times.values()) if times else 1.0
        far = {name: ratio for name, ratio in times.items() if abs(ratio - 1.0) > STEPS_NEAR}
        yield Goal(
            goal=f"at pace, prefill {kind}: captured over model within {STEPS_NEAR:.0%} of 1.0",
            found=f"× {middle:.2f} ({len(times) - len(far)} of {len(times)})" if times else "–",
            met=abs(middle - 1.0) <= STEPS_NEAR if times else None,
            missed_in=[f"{name} (× {ratio:.2f})" for name, ratio in far.items()],
        )


def _saturated(cells: Sequence[Cell]) -> Goal:
    known = [cell for cell in cells if cell.saturated and cell.quantiles["p50"].judged_error is not None]
    missed = [name_of(cell) for cell in known if (cell.quantiles["p50"].judged_error or 0.0) > SATURATED_P50]
    return Goal(
        goal=f"in saturation, error of p50 ≤ {SATURATED_P50:.0%}",
        found=f"{len(known) - len(missed)} of {len(known)}",
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


def _bands(cells: Sequence[Cell]) -> list[tuple[str, bool]]:
    """Captured quantiles, and their place in the forecast's band or beyond it."""
    every = [(f"{name_of(cell)} {level}", cell.quantiles[level].inside_band) for cell in cells for level in LEVELS]
    return [(name, held) for name, held in every if held is not None]


def _bands_at_pace(cells: Sequence[Cell]) -> list[tuple[str, bool]]:
    return [
        (f"{name_of(cell)} {level}", held)
        for cell in cells
        for level, paced in cell.paced.items()
        for held in paced.inside
    ]


def _coverage(what: str, bands: Sequence[tuple[str, bool]]) -> Goal:
    """Share of captured quantiles in their bands: too many say that the bands are too wide."""
    least, most = COVERAGE
    inside = sum(held for _, held in bands)
    share = inside / len(bands) if bands else 0.0
    verdict = ": too narrow" if share < least else ": too wide" if share > most else ""
    return Goal(
        goal=f"{what} hold {100 * least:.0f} to {most:.0%} of captured quantiles",
        found=f"{inside} of {len(bands)} ({share:.0%}){verdict}" if bands else "–",
        met=not verdict if bands else None,
        missed_in=[name for name, held in bands if not held],
    )


def _baselines(cells: Sequence[Cell]) -> Iterator[Goal]:
    """Yield each baseline in every large cell, by quantiles and by the distance of the whole curve."""
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
