"""``sim reuse``: reuse times and distances of a trace's blocks, and its working set.

Requests are taken by arrival. An access is a full prompt block. Blocks that a request's output fills are touched too,
like the curve's, but not asked for. A block without a known hash never comes again.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np

from measure.cache.accesses import Accesses
from measure.cache.hitcurve import require_block_size
from measure.cache.stackdepth import access_depths
from measure.cacheuse import Distribution, Window
from measure.metrics.sketches import ValueCounts
from measure.quantiles import quantile_place
from measure.table import table_lines
from sim.cache.pool import add_trace_flags, parse_block_size
from sim.workload.accesses import read_accesses
from tracefile.commandline.durations import duration
from tracefile.records.arrays import BoolArray, FloatArray, IntArray
from tracefile.records.errors import InputError
from tracefile.study.parts import add_store_arguments, added_up

LEVELS = tuple(step / 200 for step in range(1, 201))
"""Of a distribution's quantiles: every half percent."""
SHOWN = (0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.00)
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
    parser.add_argument("--window", type=duration, default="60s", help="duration of a window; none with --each-trace")
    add_store_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.window:
        raise InputError("--window: 0; expected a positive duration, such as 60s")
    block_size, window_ms = parse_block_size(arguments.block_size), 1e3 * arguments.window
    if arguments.each_trace:
        found = merged_reuse(added_up(arguments, partial(_reuse_part, block_size)), window_ms)
    else:
        found = measure_reuse(read_accesses(arguments.trace, block_size, needs_times=True), window_ms)
    found_json = {"kind": "reuse", "trace": str(arguments.trace), **asdict(found)}  # ``report curve`` draws it
    print(json.dumps(found_json) if arguments.json else describe(found))
    return 0


def measure_reuse(accesses: Accesses, window_ms: float) -> Reuse:
    depths, before = access_depths(accesses.blocks, accesses.starts, accesses.distinct)
    asked = accesses.asked
    again = (depths > 0) & asked
    now, then = accesses.request_of[again], before[again]
    return Reuse(
        block_size=accesses.block_size,
        requests=len(accesses.limits),
        accesses=int(asked.sum()),
        first_accesses=int((asked & ~again).sum()),
        levels=LEVELS,
        time_ms=distribution("ms", accesses.arrival_ms[now] - accesses.arrival_ms[then]),
        distance_requests=distribution("requests", now - then),
        distance_blocks=distribution("blocks", depths[again]),
        window_ms=window_ms,
        windows=working_set(accesses, depths == 0, window_ms),
    )


@dataclass(frozen=True, slots=True)
class ReusePart:
    """Reuse of one engine's blocks, or of several engines', to whole milliseconds."""

    block_size: int
    requests: int
    accesses: int
    first_accesses: int
    time_ms: ValueCounts
    distance_requests: ValueCounts
    distance_blocks: ValueCounts

    def plus(self, other: Self) -> Self:
        require_block_size(other.block_size, self.block_size)
        return type(self)(
            self.block_size,
            self.requests + other.requests,
            self.accesses + other.accesses,
            self.first_accesses + other.first_accesses,
            self.time_ms.plus(other.time_ms),
            self.distance_requests.plus(other.distance_requests),
            self.distance_blocks.plus(other.distance_blocks),
        )


def _reuse_part(block_size: int | None, trace: str) -> ReusePart:
    accesses = read_accesses(Path(trace), block_size, needs_times=True)
    depths, before = access_depths(accesses.blocks, accesses.starts, accesses.distinct)
    again = (depths > 0) & accesses.asked
    now, then = accesses.request_of[again], before[again]
    return ReusePart(
        accesses.block_size,
        len(accesses.limits),
        int(accesses.asked.sum()),
        int((accesses.asked & ~again).sum()),
        ValueCounts.of(np.rint(accesses.arrival_ms[now] - accesses.arrival_ms[then]).astype(np.int64)),
        ValueCounts.of(now - then),
        ValueCounts.of(depths[again]),
    )


def merged_reuse(part: ReusePart, window_ms: float) -> Reuse:
    """Return the reuse of many engines; without windows, as each engine has a clock of its own."""
    return Reuse(
        block_size=part.block_size,
        requests=part.requests,
        accesses=part.accesses,
        first_accesses=part.first_accesses,
        levels=LEVELS,
        time_ms=part.time_ms.distribution("ms", LEVELS),
        distance_requests=part.distance_requests.distribution("requests", LEVELS),
        distance_blocks=part.distance_blocks.distribution("blocks", LEVELS),
        window_ms=window_ms,
        windows=[],
    )


def distribution(unit: str, values: IntArray | FloatArray) -> Distribution:
    if not len(values):
        return Distribution(unit=unit, count=0, mean=None, quantiles=[])
    quantiles = np.sort(values)[[quantile_place(level, len(values)) for level in LEVELS]].tolist()
    return Distribution(unit=unit, count=len(values), mean=float(values.mean()), quantiles=quantiles)


def working_set(accesses: Accesses, first: BoolArray, window_ms: float) -> list[Window]:
    """Windows of ``window_ms`` from the first arrival on; ``first``: which accesses are of blocks not seen before."""
    if not len(accesses.arrival_ms):
        return []
    start_ms = float(accesses.arrival_ms[0])
    window_of = ((accesses.arrival_ms - start_ms) // window_ms).astype(np.int64)
    count = int(window_of[-1]) + 1
    if count > 1_000_000:
        raise InputError(f"--window: {window_ms / 1e3:g} s; it makes {count:,} windows; expected at most 1,000,000")
    where = window_of[accesses.request_of]
    touched = np.unique(where * accesses.distinct + accesses.blocks) // max(accesses.distinct, 1)
    # A prompt that names a block twice touches it once.
    fresh = np.unique(accesses.blocks[first], return_index=True)[1]
    new = np.bincount(where[first][fresh], minlength=count)
    columns = zip(
        np.bincount(window_of, minlength=count).tolist(),
        np.bincount(where[accesses.asked], minlength=count).tolist(),
        np.bincount(touched, minlength=count).tolist(),
        new.tolist(),
        np.cumsum(new).tolist(),
        strict=True,
    )
    return [
        Window(start_ms=start_ms + number * window_ms, **dict(zip(_COUNTS, row, strict=True)))
        for number, row in enumerate(columns)
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
