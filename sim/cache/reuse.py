"""Reuse of a trace's blocks, the two tables of ``sim curve --window``: times and depths of reuse, and the working set.

Requests are taken by arrival. An access is a full prompt block. Blocks that a request's output fills are touched too,
like the curve's, but not asked for. A block without a known hash never comes again.
"""

from typing import NamedTuple

import numpy as np

from measure.cache.accesses import Accesses, Piece
from measure.cache.interning import leading
from measure.cache.stackdepth import LruStack
from measure.cache.vectors import array_of, integers
from measure.quantiles import quantile_place
from measure.table import table_lines
from sim.cache.results import Distribution, Reuse, Window
from tracefile.records.arrays import BoolArray, FloatArray, IntArray
from tracefile.records.errors import InputError

LEVELS = tuple(step / 200 for step in range(1, 201))
"""Of a distribution's quantiles: every half percent."""
SHOWN = (0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.00)
WINDOWS_SHOWN = 20
_COUNTS = ("requests", "accesses", "distinct_blocks", "new_blocks", "seen_blocks")
"""Columns of a window."""


class AccessDepths(NamedTuple):
    """Accesses of a piece."""

    depths: IntArray
    """0: never touched before."""
    touches: IntArray
    """Index among all accesses of a place in the request that touched the block before; −1: none."""
    repeated: BoolArray
    """True: the same request has named the block already."""


def measure_reuse(accesses: Accesses, window_ms: float) -> Reuse:
    """Return the reuse of one trace's blocks."""
    windows = _Windows(accesses, window_ms)
    stack = LruStack(int(accesses.starts[-1]), accesses.numbers)
    times_ms, depths, accesses_in_all = [np.empty(0)], [np.empty(0, np.int64)], 0
    for piece in accesses.pieces():
        first, _, starts = piece
        found = _access_depths(stack, piece)
        end = first + len(starts) - 1
        asked = leading(starts, accesses.lookup_blocks[first:end])
        again = (found.depths > 0) & asked
        now = np.repeat(np.arange(first, end), np.diff(starts))[again]
        before = np.searchsorted(accesses.starts, found.touches[again], side="right") - 1
        times_ms.append(accesses.arrival_ms[now] - accesses.arrival_ms[before])
        depths.append(found.depths[again])
        accesses_in_all += int(asked.sum())
        windows.add(piece, found)
    reused = np.concatenate(depths)
    return Reuse(
        block_size=accesses.block_size,
        requests=len(accesses.limits),
        accesses=accesses_in_all,
        first_accesses=accesses_in_all - len(reused),
        levels=LEVELS,
        time_ms=_distribution("ms", np.concatenate(times_ms)),
        distance_blocks=_distribution("blocks", reused),
        window_ms=window_ms,
        windows=windows.result(),
    )


def _access_depths(stack: LruStack, piece: Piece) -> AccessDepths:
    depths, touches, repeated = stack.access_depths(integers(piece.blocks), integers(piece.starts))
    columns = (array_of(column, np.int64) for column in (depths, touches, repeated))
    return AccessDepths(next(columns), next(columns), next(columns) > 0)


def _distribution(unit: str, values: IntArray | FloatArray) -> Distribution:
    """Return mean and quantiles by the rule of sorted values."""
    if not len(values):
        return Distribution(unit=unit, count=0, mean=None, quantiles=[])
    ordered = np.sort(values)
    quantiles = ordered[[quantile_place(level, len(ordered)) for level in LEVELS]].tolist()
    return Distribution(unit=unit, count=len(ordered), mean=float(ordered.mean()), quantiles=quantiles)


class _Windows:
    """Windows of ``window_ms`` from the first arrival on."""

    def __init__(self, accesses: Accesses, window_ms: float) -> None:
        self._accesses, self._window_ms = accesses, window_ms
        since_ms = accesses.arrival_ms - accesses.arrival_ms[:1]
        self._window_of = (since_ms // window_ms).astype(np.int64)
        self._count = int(self._window_of[-1]) + 1 if len(since_ms) else 0
        if self._count > 1_000_000:
            raise InputError(
                f"--window: {window_ms / 1e3:g} s; it makes {self._count:,} windows; expected at most 1,000,000"
            )
        self._begins = accesses.starts[np.searchsorted(self._window_of, np.arange(self._count))]
        """First access in or after each window."""
        self._asked, self._touched, self._new = np.zeros((3, self._count), np.int64)

    def add(self, piece: Piece, found: AccessDepths) -> None:
        first, _, starts = piece
        end = first + len(starts) - 1
        where = np.repeat(self._window_of[first:end], np.diff(starts))
        new = ~found.repeated & (found.depths == 0)
        touched = new | (~found.repeated & (found.touches < self._begins[where]))
        asked = leading(starts, self._accesses.lookup_blocks[first:end])
        self._asked += np.bincount(where[asked], minlength=self._count)
        self._touched += np.bincount(where[touched], minlength=self._count)
        self._new += np.bincount(where[new], minlength=self._count)

    def result(self) -> list[Window]:
        start_ms = self._accesses.arrival_ms[:1].sum()
        requests = np.bincount(self._window_of, minlength=self._count)
        columns = (requests, self._asked, self._touched, self._new, np.cumsum(self._new))
        return [
            Window(start_ms=float(start_ms + number * self._window_ms), **dict(zip(_COUNTS, row, strict=True)))
            for number, row in enumerate(zip(*(column.tolist() for column in columns), strict=True))
        ]


def describe_reuse(reuse: Reuse) -> list[str]:
    again = reuse.accesses - reuse.first_accesses
    lines = [
        "",
        f"{reuse.accesses:,} accesses of full prompt blocks of {reuse.block_size} tokens: "
        f"{reuse.first_accesses:,} first ones, {again:,} again",
    ]
    rows = [
        [one.unit, f"{one.mean:,.0f}", *(f"{one.at(level):,.0f}" for level in SHOWN)]
        for one in (reuse.time_ms, reuse.distance_blocks)
        if one.mean is not None
    ]
    lines += table_lines(["reuse after", "mean", *(f"p{level * 100:.0f}" for level in SHOWN)], rows)
    if not reuse.windows:
        return lines
    rows = [
        [f"{window.start_ms / 1e3:,.0f}", *(f"{getattr(window, name):,}" for name in _COUNTS)]
        for window in reuse.windows[:: -(-len(reuse.windows) // WINDOWS_SHOWN) or 1]
    ]
    headings = ["from (s)", "requests", "accesses", "distinct", "new", "seen so far"]
    return [*lines, "", f"windows of {reuse.window_ms / 1e3:g} s, in blocks", *table_lines(headings, rows)]
