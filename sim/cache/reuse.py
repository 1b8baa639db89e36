"""``sim reuse``: reuse times and distances of a trace's blocks, and its working set.

Requests are taken by arrival. An access is a full prompt block. Blocks that a request's output fills are touched too,
like the curve's, but not asked for. A block without a known hash never comes again.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from functools import reduce
from math import fsum
from operator import mul
from typing import TYPE_CHECKING, Any, Self

from measure.cacheuse import Distribution, Window
from measure.quantiles import quantile_place
from measure.table import table_lines
from sim.cache.pool import add_trace_flags, parse_block_size
from tracefile.commandline.durations import duration
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.errors import InputError
from tracefile.records.latenames import LateModule, late_modules

if TYPE_CHECKING:
    import numpy as np

    from measure.cache import interning, stackdepth
    from measure.cache.accesses import Accesses, Piece
    from measure.cache.stackdepth import AccessDepths
    from sim.workload import accesses as workload_accesses
else:  # numpy, which the flags need not
    np = LateModule("numpy")
    stackdepth, interning = late_modules("measure.cache", "stackdepth interning")
    workload_accesses = LateModule("sim.workload.accesses")


LEVELS = tuple(step / 200 for step in range(1, 201))
"""Of a distribution's quantiles: every half percent."""
SHOWN = (0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.00)
WINDOW_S = 60.0
WINDOWS_SHOWN = 20
_COUNTS = ("requests", "accesses", "distinct_blocks", "new_blocks", "seen_blocks")
"""Columns of a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Result of ``sim reuse``."""

    block_size: int
    requests: int
    accesses: int
    first_accesses: int
    """Of blocks never touched before; the others are what the distributions are over."""
    levels: tuple[float, ...]
    time_ms: Distribution
    distance_requests: Distribution
    distance_blocks: Distribution
    window_ms: float
    windows: list[Window]


EPILOG = "examples:\n  sim reuse monday.jsonl.zst --window 5m\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_flags(parser)
    parser.add_argument("--window", type=duration, help="duration of a window (default 60s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if arguments.window == 0.0:
        raise InputError("--window: 0; expected a positive duration, such as 60s")
    block_size, window_ms = (
        parse_block_size(arguments.block_size),
        1e3 * (WINDOW_S if arguments.window is None else arguments.window),
    )
    found = measure_reuse(workload_accesses.read_accesses(arguments.trace, block_size, needs_times=True), window_ms)
    found_json = {"kind": "reuse", "trace": str(arguments.trace), **asdict(found)}  # ``report curve`` draws it
    print(json.dumps(found_json) if arguments.json else describe(found))
    return 0


@dataclass(frozen=True, slots=True)
class ValueCounts:
    """Different values, in order, and how often each occurs."""

    values: IntArray | FloatArray
    counts: IntArray

    @classmethod
    def of(cls, values: IntArray | FloatArray, counts: IntArray) -> Self:
        """Count values that occur so many times each."""
        ordered: Any
        ordered, index = np.unique(values, return_inverse=True)
        weights = counts.astype(np.float64)  # exact below 2⁵³
        return cls(ordered, np.bincount(index, weights, len(ordered)).astype(np.int64))

    def plus(self, other: Self) -> Self:
        return type(self).of(np.concatenate([self.values, other.values]), np.concatenate([self.counts, other.counts]))

    def distribution(self, unit: str) -> Distribution:
        """Return mean and quantiles by the rule of sorted values."""
        up_to = np.cumsum(self.counts)
        if not len(up_to):
            return Distribution(unit=unit, count=0, mean=None, quantiles=[])
        count = int(up_to[-1])
        places = [quantile_place(level, count) for level in LEVELS]
        quantiles = self.values[np.searchsorted(up_to, places, side="right")].tolist()
        total = fsum(map(mul, self.values.tolist(), self.counts.tolist()))
        return Distribution(unit=unit, count=count, mean=total / count, quantiles=quantiles)


def measure_reuse(accesses: "Accesses", window_ms: float) -> Reuse:
    """Return the reuse of one trace's blocks."""
    windows = _Windows(accesses, window_ms)
    recency, touched_by = (
        stackdepth.untouched(int(accesses.starts[-1]), accesses.numbers),
        np.full(accesses.numbers, -1),
    )
    at_depth = np.zeros(accesses.distinct + 1, np.int64)
    none = np.empty(0, np.int64)
    times_ms, distances = [ValueCounts(np.empty(0), none)], [ValueCounts(none, none)]
    asked_in_all = 0
    for piece in accesses.pieces():
        first, _, starts = piece
        found = stackdepth.access_depths(recency, touched_by, piece)
        end = first + len(starts) - 1
        asked = interning.leading(starts, accesses.lookup_blocks[first:end])
        again = (found.depths > 0) & asked
        now, then = np.repeat(np.arange(first, end), np.diff(starts))[again], found.before[again]
        now, then, counts = _equal_runs(now, then)
        _gather(times_ms, ValueCounts.of(accesses.arrival_ms[now] - accesses.arrival_ms[then], counts))
        _gather(distances, ValueCounts.of(now - then, counts))
        np.add.at(at_depth, found.depths[again], 1)
        asked_in_all += int(asked.sum())
        windows.add(piece, found)
    depths = np.flatnonzero(at_depth)
    return Reuse(
        block_size=accesses.block_size,
        requests=len(accesses.limits),
        accesses=asked_in_all,
        first_accesses=asked_in_all - int(at_depth.sum()),
        levels=LEVELS,
        time_ms=reduce(ValueCounts.plus, times_ms).distribution("ms"),
        distance_requests=reduce(ValueCounts.plus, distances).distribution("requests"),
        distance_blocks=ValueCounts(depths, at_depth[depths]).distribution("blocks"),
        window_ms=window_ms,
        windows=windows.found(),
    )


def _gather(sums: list[ValueCounts], new: ValueCounts) -> None:
    """Add to sums of falling sizes, so that each value is sorted few times."""
    sums.append(new)
    while len(sums) > 1 and len(sums[-2].values) <= 2 * len(sums[-1].values):
        last = sums.pop()
        sums[-1] = sums[-1].plus(last)


def _equal_runs(now: IntArray, then: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return pairs that differ from the pair before, and the length of each run of equal ones."""
    begins = np.flatnonzero(np.append(True, (np.diff(now) != 0) | (np.diff(then) != 0))[: len(now)])
    return now[begins], then[begins], np.diff(begins, append=len(now))


class _Windows:
    """Windows of ``window_ms`` from the first arrival on."""

    def __init__(self, accesses: "Accesses", window_ms: float) -> None:
        self._accesses, self._window_ms = accesses, window_ms
        since_ms = accesses.arrival_ms - accesses.arrival_ms[:1]
        self._window_of = (since_ms // window_ms).astype(np.int64)
        self._count = int(self._window_of[-1]) + 1 if len(since_ms) else 0
        if self._count > 1_000_000:
            raise InputError(
                f"--window: {window_ms / 1e3:g} s; it makes {self._count:,} windows; expected at most 1,000,000"
            )
        self._asked, self._touched, self._new = np.zeros((3, self._count), np.int64)

    def add(self, piece: "Piece", found: "AccessDepths") -> None:
        first, _, starts = piece
        end = first + len(starts) - 1
        where = np.repeat(self._window_of[first:end], np.diff(starts))
        new = ~found.repeated & (found.depths == 0)
        touched = new | (~found.repeated & (self._window_of[found.before] != where))
        asked = interning.leading(starts, self._accesses.lookup_blocks[first:end])
        self._asked += np.bincount(where[asked], minlength=self._count)
        self._touched += np.bincount(where[touched], minlength=self._count)
        self._new += np.bincount(where[new], minlength=self._count)

    def found(self) -> list[Window]:
        start_ms = self._accesses.arrival_ms[:1].sum()
        requests = np.bincount(self._window_of, minlength=self._count)
        columns = (requests, self._asked, self._touched, self._new, np.cumsum(self._new))
        return [
            Window(start_ms=float(start_ms + number * self._window_ms), **dict(zip(_COUNTS, row, strict=True)))
            for number, row in enumerate(zip(*(column.tolist() for column in columns), strict=True))
        ]


def describe(found: Reuse) -> str:
    again = found.accesses - found.first_accesses
    lines = [
        f"{found.accesses:,} accesses of full prompt blocks of {found.block_size} tokens: "
        f"{found.first_accesses:,} first ones, {again:,} again"
    ]
    rows = [
        [one.unit, f"{one.mean:,.0f}", *(f"{one.at(level):,.0f}" for level in SHOWN)]
        for one in (found.time_ms, found.distance_requests, found.distance_blocks)
        if one.mean is not None
    ]
    lines += table_lines(["reuse after", "mean", *(f"p{level * 100:.0f}" for level in SHOWN)], rows)
    if not found.windows:
        return "\n".join(lines)
    lines += ["", f"windows of {found.window_ms / 1e3:g} s, in blocks"]
    rows = [
        [f"{window.start_ms / 1e3:,.0f}", *(f"{getattr(window, name):,}" for name in _COUNTS)]
        for window in found.windows[:: -(-len(found.windows) // WINDOWS_SHOWN) or 1]
    ]
    headings = ["from (s)", "requests", "accesses", "distinct", "new", "seen so far"]
    return "\n".join(lines + table_lines(headings, rows))
