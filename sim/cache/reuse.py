"""Reuse of a trace's blocks, ``sim curve --reuse``: times and depths between two uses.

Requests are taken by arrival. An access is a full prompt block. Blocks that a request's output fills are touched too,
like the curve's, but not asked for. A block without a known hash never comes again.
"""

from dataclasses import dataclass

import numpy as np

from measure.cache.accesses import Accesses
from measure.cache.interning import leading
from measure.cache.stackdepth import LruStack
from measure.cache.vectors import array_of, integers
from measure.quantiles import quantile_place
from measure.table import table_lines
from tracefile.records.arrays import FloatArray, IntArray

LEVELS = tuple(step / 200 for step in range(1, 201))
"""Of a distribution's quantiles: every half percent."""
SHOWN = (0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.00)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Distances between two accesses of one block, over all accesses but first ones."""

    unit: str
    count: int
    mean: float | None
    """Null: there are none."""
    quantiles: list[float]
    """At even levels up to 1: the smallest value that at least that share does not exceed. Empty: there are none."""

    def at(self, level: float) -> float:
        return self.quantiles[round(level * len(self.quantiles)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Reuse of one trace's blocks."""

    block_size: int
    requests: int
    accesses: int
    first_accesses: int
    """Of blocks never touched before; the others are what the distributions are over."""
    levels: tuple[float, ...]
    time_ms: Distribution
    distance_blocks: Distribution


def measure_reuse(accesses: Accesses) -> Reuse:
    """Return the reuse of one trace's blocks."""
    stack = LruStack(int(accesses.starts[-1]), accesses.numbers)
    times_ms, depths, accesses_in_all = [np.empty(0)], [np.empty(0, np.int64)], 0
    for first, blocks, starts in accesses.pieces():
        columns = stack.access_depths(integers(blocks), integers(starts))
        depth, touches = (array_of(column, np.int64) for column in columns)
        end = first + len(starts) - 1
        asked = leading(starts, accesses.lookup_blocks[first:end])
        again = (depth > 0) & asked
        now = np.repeat(np.arange(first, end), np.diff(starts))[again]
        before = np.searchsorted(accesses.starts, touches[again], side="right") - 1
        times_ms.append(accesses.arrival_ms[now] - accesses.arrival_ms[before])
        depths.append(depth[again])
        accesses_in_all += int(asked.sum())
    reused = np.concatenate(depths)
    return Reuse(
        block_size=accesses.block_size,
        requests=len(accesses.limits),
        accesses=accesses_in_all,
        first_accesses=accesses_in_all - len(reused),
        levels=LEVELS,
        time_ms=_distribution("ms", np.concatenate(times_ms)),
        distance_blocks=_distribution("blocks", reused),
    )


def _distribution(unit: str, values: IntArray | FloatArray) -> Distribution:
    """Return mean and quantiles by the rule of sorted values."""
    if not len(values):
        return Distribution(unit=unit, count=0, mean=None, quantiles=[])
    ordered = np.sort(values)
    quantiles = ordered[[quantile_place(level, len(ordered)) for level in LEVELS]].tolist()
    return Distribution(unit=unit, count=len(ordered), mean=float(ordered.mean()), quantiles=quantiles)


def describe_reuse(reuse: Reuse) -> list[str]:
    again = reuse.accesses - reuse.first_accesses
    lines = [
        "",
        f"{reuse.accesses:,} accesses of full prompt blocks of {reuse.block_size} tokens: "
        f"{reuse.first_accesses:,} first ones, {again:,} again",
    ]
    rows = [
        [distribution.unit, f"{distribution.mean:,.0f}", *(f"{distribution.at(level):,.0f}" for level in SHOWN)]
        for distribution in (reuse.time_ms, reuse.distance_blocks)
        if distribution.mean is not None
    ]
    return lines + table_lines(["reuse after", "mean", *(f"p{level * 100:.0f}" for level in SHOWN)], rows)
