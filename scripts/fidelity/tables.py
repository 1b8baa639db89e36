"""The matrix's verdicts as Markdown, of which docs/dev/results.md shows a part."""

from collections.abc import Sequence

from scripts.fidelity.goals import Goal, goals, name_of, rounds
from scripts.fidelity.judging import LEVELS, Cell, Paced, Quantile, Verdicts
from scripts.fidelity.steps import ANSWERS, PREFILLS
from scripts.markdown import markdown_table

CAPTIONS = {
    "warm": "Warm: the prefix cache on, empty at the start",
    "small": "A cache too small for the load",
    "uncached": "Cold, measured with the prefix cache off, forecast from the warm capture",
    "cold-replayed": "Cold, measured by `replay --cold-prompts`, forecast from the warm capture",
}
DECODES = "Steps of decodes alone, by the answers in them: captured over model, with prefixes shared and not"
PREFILL_STEPS = "Prefill alone and beside decodes: captured over model, and the same at the capture's pace"


def page(verdicts: Verdicts) -> str:
    """All tables."""
    parts = [goals_table(verdicts.cells)]
    for shape in dict.fromkeys(cell.shape for cell in verdicts.cells):
        for way, caption in CAPTIONS.items():
            cells = [cell for cell in verdicts.cells if (cell.shape, cell.way) == (shape, way)]
            if cells:
                parts.append(f"**{shape}. {caption}.**\n\n{cells_table(cells)}")
        own = [cell for cell in verdicts.cells if cell.shape == shape]
        parts.append(f"**{shape}. {PREFILL_STEPS}.**\n\n{prefills_table(own)}")
        parts.append(f"**{shape}. {DECODES}.**\n\n{decodes_table(own)}")
        parts.append(markdown_table(["parameter", f"fitted on {shape}'s calibrations"], verdicts.models[shape].items()))
    return "\n\n".join(parts)


def goals_table(cells: Sequence[Cell]) -> str:
    """Goals over all cells and over each round's: a column each, and the cells that miss a goal."""
    found = {name: {goal.goal: goal for goal in goals(own)} for name, own in rounds(cells).items()}
    rows = [
        [goal, *(_verdict(own.get(goal)) for own in found.values()), "; ".join(every.missed_in) or "–"]
        for goal, every in found.get("all", {}).items()
    ]
    return markdown_table(["goal", *found, "not in"], rows)


def _verdict(goal: Goal | None) -> str:
    if goal is None or goal.met is None:
        return "no cell"
    return f"{goal.found} {'✓' if goal.met else '✗'}"


def cells_table(cells: Sequence[Cell]) -> str:
    """Table of one way's cells: a row per cohort."""
    paced = f"at pace: {' / '.join(LEVELS)}"
    headings = ["load", "n", "censored", "cached exact", "offered", "steps", *LEVELS, paced, "W1, ms", "A/A", "fails"]
    return markdown_table(headings, map(_cell_row, cells))


def decodes_table(cells: Sequence[Cell]) -> str:
    """The pace of decodes, warm beside uncached: a row a load."""
    paces = {(cell.load, cell.way): cell.steps.decodes for cell in cells}
    rows = [
        [load, *(_times(paces.get((load, way), {}).get(size)) for size in ANSWERS for way in ("warm", "uncached"))]
        for load in dict.fromkeys(load for load, way in paces if way == "warm")
    ]
    return markdown_table(["load", *(f"{size}, {way}" for size in ANSWERS for way in ("shared", "not"))], rows)


def prefills_table(cells: Sequence[Cell]) -> str:
    """Times of steps with prefill, by what else the engine did: a row a capture."""
    captures = {(cell.load, cell.way): cell for cell in cells}
    rows = [
        [load, way, _times(cell.pace), *(_times_at_pace(cell.steps.prefills.get(kind), cell.pace) for kind in PREFILLS)]
        for (load, way), cell in captures.items()
    ]
    return markdown_table(["load", "way", "all steps", *PREFILLS], rows)


def _times_at_pace(ratio: float | None, pace: float | None) -> str:
    return _times(ratio) if ratio is None or pace is None else f"{_times(ratio)}, {ratio / pace:.2f}"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"× {ratio:.2f}"


def _cell_row(cell: Cell) -> list[str]:
    exact = "–" if cell.cached_exact is None or not cell.cached_n else f"{cell.cached_exact:.1%}"
    if cell.preemptions:
        exact += f", {cell.preemptions} preempted"
    return [
        name_of(cell).removeprefix(f"{cell.shape} ").replace(f" {cell.way}", ""),
        str(cell.n),
        f"{cell.censored / cell.n:.0%}",
        exact,
        f"{cell.offered:.0%}" + (" saturated" if cell.saturated else ""),
        _times(cell.pace),
        *(_quantile(cell.quantiles[level]) for level in LEVELS),
        _at_pace(cell.paced),
        f"{cell.w1_ms:,.0f}" if cell.w1_ms is not None else "–",
        _spreads(cell),
        ", ".join(cell.failed_gates) or "–",
    ]


def _quantile(one: Quantile) -> str:
    """``145 → 136, **−6.2 %** (−12 … 1) ✓``: captured, forecast, its error, its band over the captured, inside it."""
    if one.captured_ms is None or one.forecast_ms is None or one.error is None:
        return "–"
    ends = ["" if end is None else f"{end * 100:+.0f}" for end in (one.band_low, one.band_high)]
    held = "" if one.inside_band is None else " ✓" if one.inside_band else " ✗"
    thin = "*" if one.thin else ""
    return f"{one.captured_ms:,.0f}{thin} → {one.forecast_ms:,.0f}, **{one.error:+.1%}** ({' … '.join(ends)}){held}"


def _at_pace(paced: dict[str, Paced]) -> str:
    """``+1.1% ✓ / −2.0% ✓✓✗ / –``: mean error of the captures, each at its own pace, and a mark a band."""
    if not paced:
        return "–"
    every = [paced.get(level) for level in LEVELS]
    return " / ".join("–" if one is None or one.error is None else _error_and_bands(one) for one in every)


def _error_and_bands(one: Paced) -> str:
    return f"{one.error:+.1%} {''.join('✓' if held else '✗' for held in one.inside)}".rstrip()


def _spreads(cell: Cell) -> str:
    """Differences of the captures of this load."""
    spreads = [one.spread for one in cell.quantiles.values() if one.spread is not None]
    return " / ".join(f"{spread:.0%}" for spread in spreads) or "–"
