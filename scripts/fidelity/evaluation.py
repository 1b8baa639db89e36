"""Evaluation of a round from its files: fit calibrations, forecast latencies of every gate, compare with captures.

Takes minutes and needs no engine, so it can be repeated after every change of the simulator.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from scripts.fidelity.loads import Capture, Round, Way, capture_named, read_round
from scripts.job import Command, Workspace
from scripts.markdown import markdown_table
from scripts.processes import CORES

LEVELS = ("p50", "p90", "p99")
WARM_WAYS: tuple[Way, ...] = ("warm", "small")
COLD_WAYS: tuple[Way, ...] = ("uncached", "cold-replayed")
"""Cold captures are forecast from the warm capture, like a what-if."""
REPEATS: dict[Way, tuple[Way, ...]] = {"warm": ("again", "again-2"), "uncached": ("uncached-again",)}
LIMITS = {"p50": 0.05, "p90": 0.10, "p99": 0.15}
"""Goals for the median |error| of TTFT quantiles below saturation."""
MIN_CELL = 20


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Latency forecast errors of a cohort of a gate."""

    round: str
    gate: str
    cohort: str
    n: int
    cached_exact: float | None
    """Share of requests with equal cached tokens."""
    saturated: bool
    errors: dict[str, float | None]
    """(forecast − captured) / captured of TTFT by level; null: beyond the longest captured TTFT."""
    inside: dict[str, bool | None]
    """True: the captured quantile is inside the forecast's 90 % band."""


def evaluate_round(folder: Path, out: Path) -> list[Cell]:
    """Fit the round's latency model and evaluate every captured gate."""
    work = Workspace(out / folder.name)
    work.directory.mkdir(parents=True, exist_ok=True)
    names = [path.name.removesuffix(".jsonl.zst") for path in sorted(folder.glob("*.jsonl.zst"))]
    captures = {capture.name: capture for capture in map(capture_named, names)}
    calibrations = [folder / f"{name}.jsonl.zst" for name in captures if name.startswith("calibration")]
    sized = read_round(folder) or Round(loads={})
    model = work.path("model.json")
    work.run("fit", ["sim", "calibrate", *calibrations, *sized.scheduler, "--overwrite", "-o", model])
    gates = [
        capture
        for capture in captures.values()
        if capture.way in (*WARM_WAYS, *COLD_WAYS) and not capture.load.startswith("calibration")
    ]

    def evaluate(capture: Capture) -> list[Cell]:
        return list(_cells(folder.name, capture, _validated(folder, work, model, capture, captures)))

    with ThreadPoolExecutor(len(CORES) or 1) as pool:  # each thread waits for its command
        return [cell for cells in pool.map(evaluate, gates) for cell in cells]


def _validated(
    folder: Path, work: Workspace, model: Path, capture: Capture, captures: dict[str, Capture]
) -> dict[str, Any]:
    repeats = [Capture(capture.load, way).name for way in REPEATS.get(capture.way, ())]
    repeats = [name for name in repeats if name in captures]
    if capture.way in COLD_WAYS:
        command: Command = ["sim", "validate", folder / f"{capture.load}.jsonl.zst"]
        flags = [word for name in (capture.name, *repeats) for word in ("--cold", folder / f"{name}.jsonl.zst")]
    else:
        command = ["sim", "validate", folder / f"{capture.name}.jsonl.zst"]
        flags = [word for name in repeats for word in ("--repeat", folder / f"{name}.jsonl.zst")]
    output = work.path(f"{capture.name}.json")
    command = [*command, "--latency-model", model, *flags, "--json"]
    work.run(capture.name, command, stdout=output, accept=(0, 1, 3))
    result: dict[str, Any] = json.loads(output.read_bytes())
    return result


def _cells(round_name: str, capture: Capture, result: dict[str, Any]) -> Iterator[Cell]:
    """Yield the cohorts with at least ``MIN_CELL`` requests."""
    label = "cold-predicted" if capture.way in COLD_WAYS else "predicted"
    pair = result["pairs"][label]
    for cohort in ("turn1", "turns2+") if capture.load.startswith("session") else ("all",):
        cell = pair["cohorts"].get(cohort)
        if cell is None or cell["ttft"]["n_truth"] < MIN_CELL:
            continue
        levels = {level: cell["ttft"].get(level) or {} for level in LEVELS}
        yield Cell(
            round=round_name,
            gate=capture.name,
            cohort=cohort,
            n=cell["ttft"]["n_truth"],
            cached_exact=cell["cached"]["exact_share"],
            saturated=result["forecasts"][label]["saturated"],
            errors={level: value.get("signed_error") for level, value in levels.items()},
            inside={level: value.get("inside_band") for level, value in levels.items()},
        )


def tables(cells: Sequence[Cell]) -> str:
    """Return Markdown tables of goals and cells."""
    goals = []
    below = [cell for cell in cells if not cell.saturated]
    for level, limit in LIMITS.items():
        errors = [abs(error) for cell in below if (error := cell.errors[level]) is not None]
        inside = [value for cell in below if (value := cell.inside[level]) is not None]
        median_error, worst = (median(errors), max(errors)) if errors else (0.0, 0.0)
        coverage = f"{sum(inside)} of {len(inside)}"
        goals.append([level, f"{median_error:.1%}", f"{worst:.1%}", coverage, "yes" if median_error <= limit else "NO"])
    rows = [
        [
            f"{cell.round} {cell.gate}",
            "" if cell.cohort == "all" else cell.cohort,
            str(cell.n),
            "–" if cell.cached_exact is None else f"{cell.cached_exact:.1%}",
            "saturated" if cell.saturated else "",
            *(_error(cell, level) for level in LEVELS),
        ]
        for cell in cells
    ]
    headings = ["gate", "cohort", "n", "cached exact", "", *LEVELS]
    return "\n\n".join(
        [
            markdown_table(["below saturation", "median error", "largest", "inside the band", "goal met"], goals),
            markdown_table(headings, rows),
        ]
    )


def _error(cell: Cell, level: str) -> str:
    error, inside = cell.errors[level], cell.inside[level]
    mark = "" if inside is None else " ✓" if inside else " ✗"
    return "–" if error is None else f"{error:+.1%}{mark}"
