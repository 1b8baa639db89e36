"""Curves and reuse of many engines: each trace of a store is one engine's, worked out alone, and the counts are added.

Parts are whole numbers, so that sums are the same in any order: on one core, on all, and on a Ray cluster.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, Self, TypeVar

import numpy as np

from measure.cache.hitcurve import HitCurve, hit_curve
from measure.cache.stackdepth import access_depths
from measure.cacheuse import Distribution
from measure.quantiles import quantile_place
from sim.workload.accesses import read_accesses
from tracefile.commandline.progress import counted
from tracefile.commandline.workers import add_worker_arguments, results
from tracefile.records.arrays import FloatArray, IntArray
from tracefile.records.errors import InputError
from tracefile.study.index import traces_below


class _Part(Protocol):
    @property
    def block_size(self) -> int:
        """Return the tokens in a block."""

    def plus(self, other: Self) -> Self:
        """Return the sum of two parts."""


Part = TypeVar("Part", bound=_Part)


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("many engines")
    group.add_argument(
        "--each-trace",
        action="store_true",
        help="take TRACE as a folder or URL of traces, at any depth: one engine with a cache of its own each; add up "
        "their counts",
    )
    add_worker_arguments(group)


def added_up(arguments: argparse.Namespace, work: Callable[[str], Part]) -> Part:
    """Return the sum of all traces' parts. Raises InputError for blocks of two sizes, or if there is no trace."""
    traces = traces_below(str(arguments.trace))
    whole: Part | None = None
    done = results(work, traces, procs=arguments.procs, ray=arguments.ray)
    for trace, part in counted(done, "traces"):
        if whole is not None and part.block_size != whole.block_size:
            raise InputError(
                f"{trace}: blocks of {part.block_size} tokens; expected {whole.block_size}, as in the others, or "
                "--block-size"
            )
        whole = part if whole is None else whole.plus(part)
    assert whole is not None
    return whole


@dataclass(frozen=True, slots=True)
class CurvePart:
    """Curve of one engine, or of several with a cache of each size each."""

    curve: HitCurve

    @property
    def block_size(self) -> int:
        return self.curve.block_size

    def plus(self, other: Self) -> Self:
        """Return both curves, each continued by its last value, added up."""
        one, two = self.curve, other.curve
        count = max(len(one.sizes), len(two.sizes))
        made = HitCurve(
            np.arange(1, count + 1, dtype=np.int64),
            _longer(one.hit_blocks, count) + _longer(two.hit_blocks, count),
            _longer(one.bound_blocks, count) + _longer(two.bound_blocks, count),
            one.block_size,
            one.lookup_blocks + two.lookup_blocks,
            one.input_tokens + two.input_tokens,
            min(one.fine_block_size, two.fine_block_size),
            one.requests + two.requests,
            one.whole_chains + two.whole_chains,
        )
        return type(self)(made)


def _longer(counts: IntArray, count: int) -> IntArray:
    last = counts[-1] if len(counts) else 0
    return np.concatenate([counts, np.full(count - len(counts), last, np.int64)])


def curve_of(block_size: int | None) -> Callable[[str], CurvePart]:
    """Return the work on a trace."""
    return partial(_curve_part, block_size)


def _curve_part(block_size: int | None, trace: str) -> CurvePart:
    return CurvePart(hit_curve(read_accesses(Path(trace), block_size)))


@dataclass(frozen=True, slots=True)
class ValueCounts:
    """Different values, in order, and how often each occurs."""

    values: IntArray
    counts: IntArray

    @classmethod
    def of(cls, values: IntArray | FloatArray) -> Self:
        return cls(*np.unique(np.rint(values).astype(np.int64), return_counts=True))

    def plus(self, other: Self) -> Self:
        values, place = np.unique(np.concatenate([self.values, other.values]), return_inverse=True)
        counts = np.zeros(len(values), np.int64)
        np.add.at(counts, place, np.concatenate([self.counts, other.counts]))
        return type(self)(values, counts)

    def distribution(self, unit: str, levels: tuple[float, ...]) -> Distribution:
        """Return quantiles by the rule of sorted values."""
        up_to = np.cumsum(self.counts)
        if not len(up_to):
            return Distribution(unit=unit, count=0, mean=None, quantiles=[])
        count = int(up_to[-1])
        places = np.searchsorted(up_to, [quantile_place(level, count) for level in levels], side="right")
        total = sum(value * times for value, times in zip(self.values.tolist(), self.counts.tolist(), strict=True))
        quantiles = self.values[places].astype(float).tolist()
        return Distribution(unit=unit, count=count, mean=total / count, quantiles=quantiles)


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
        return type(self)(
            self.block_size,
            self.requests + other.requests,
            self.accesses + other.accesses,
            self.first_accesses + other.first_accesses,
            self.time_ms.plus(other.time_ms),
            self.distance_requests.plus(other.distance_requests),
            self.distance_blocks.plus(other.distance_blocks),
        )


def reuse_of(block_size: int | None) -> Callable[[str], ReusePart]:
    """Return the work on a trace."""
    return partial(_reuse_part, block_size)


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
        ValueCounts.of(accesses.arrival_ms[now] - accesses.arrival_ms[then]),
        ValueCounts.of(now - then),
        ValueCounts.of(depths[again]),
    )
