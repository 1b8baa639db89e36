"""Block reuse of a trace, ``sim curve --reuse``: times and LRU depths between two accesses of a block.

Requests run in order of arrival. An access is a lookup of a full prompt block. Blocks that an output fills are touched,
as in the curve, but not looked up. A block without a hash is never accessed again.
"""

from dataclasses import dataclass

import numpy as np

from measure.cache.accesses import Accesses
from measure.cache.interning import leading
from measure.cache.stackdepth import LruStack
from measure.cache.vectors import array_of, integers
from measure.quantiles import quantile_index
from measure.table import table_lines
from tracefile.records.arrays import FloatArray, IntArray

LEVELS = tuple(step / 200 for step in range(1, 201))
"""Levels of the quantiles: every half percent."""
SHOWN = (0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.00)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Distances between consecutive accesses of a block, over all repeated accesses."""

    unit: str
    count: int
    mean: float | None
    """Null: no repeated access."""
    quantiles: list[float]
    """Quantiles at even levels up to 1. Empty: no repeated access."""

    def at(self, level: float) -> float:
        return self.quantiles[round(level * len(self.quantiles)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Block reuse of a trace."""

    block_size: int
    requests: int
    accesses: int
    first_accesses: int
    """Accesses of blocks never touched before; the distributions are over the other accesses."""
    levels: tuple[float, ...]
    time_ms: Distribution
    distance_blocks: Distribution


def measure_reuse(accesses: Accesses) -> Reuse:
    """Measure the block reuse of a trace."""
    stack = LruStack(int(accesses.starts[-1]), accesses.numbers)
    times_ms, depths, num_accesses = [np.empty(0)], [np.empty(0, np.int64)], 0
    for first, blocks, starts in accesses.pieces():
        columns = stack.access_depths(integers(blocks), integers(starts))
        depth, touches = (array_of(column, np.int64) for column in columns)
        end = first + len(starts) - 1
        looked_up = leading(starts, accesses.lookup_blocks[first:end])
        is_repeated = (depth > 0) & looked_up
        now = np.repeat(np.arange(first, end), np.diff(starts))[is_repeated]
        before = np.searchsorted(accesses.starts, touches[is_repeated], side="right") - 1
        times_ms.append(accesses.arrival_ms[now] - accesses.arrival_ms[before])
        depths.append(depth[is_repeated])
        num_accesses += int(looked_up.sum())
    reused = np.concatenate(depths)
    return Reuse(
        block_size=accesses.block_size,
        requests=len(accesses.limits),
        accesses=num_accesses,
        first_accesses=num_accesses - len(reused),
        levels=LEVELS,
        time_ms=_distribution("ms", np.concatenate(times_ms)),
        distance_blocks=_distribution("blocks", reused),
    )


def _distribution(unit: str, values: IntArray | FloatArray) -> Distribution:
    if not len(values):
        return Distribution(unit=unit, count=0, mean=None, quantiles=[])
    ordered = np.sort(values)
    quantiles = ordered[[quantile_index(level, len(ordered)) for level in LEVELS]].tolist()
    return Distribution(unit=unit, count=len(ordered), mean=float(ordered.mean()), quantiles=quantiles)


def describe_reuse(reuse: Reuse) -> list[str]:
    repeated = reuse.accesses - reuse.first_accesses
    lines = [
        "",
        f"{reuse.accesses:,} accesses of full prompt blocks of {reuse.block_size} tokens: "
        f"{reuse.first_accesses:,} first, {repeated:,} repeated",
    ]
    rows = [
        [distribution.unit, f"{distribution.mean:,.0f}", *(f"{distribution.at(level):,.0f}" for level in SHOWN)]
        for distribution in (reuse.time_ms, reuse.distance_blocks)
        if distribution.mean is not None
    ]
    return lines + table_lines(["reuse after", "mean", *(f"p{level * 100:.0f}" for level in SHOWN)], rows)
