"""The tree that a whole workload's chains form, as spans: blocks between one branch, or one chain's end, and the next.

Every chain is then a list of whole spans, so that what would look at all blocks of a request looks at a few spans.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.kernels.compiling import entry, kernel
from sim.kernels.layout import SOURCES, Ints, Places, Records, record
from sim.kernels.slots import end_of_match, first_slot

SPAN = record(f"base start end {SOURCES}")
"""Blocks ``start`` to ``end`` of the chain whose key number d is ``keys[base + d]``."""
NOT_CHAINED = -1

Keys = npt.NDArray[np.uint64]


class Tree(NamedTuple):
    """Spans and where to find them."""

    spans: Records
    """Room for two for each chain."""
    table: Ints
    """Slots by a span's first key: its number and 1; 2**n of them, twice as many as spans at least."""


@entry
def grow_tree(tree: Tree, keys: Keys, starts: Places) -> int:
    """Cut chains, number r from ``starts[r]`` to ``starts[r + 1]``, into spans; returns how many there are."""
    count = 0
    for number in range(len(starts) - 1):
        first, length, depth = starts[number], starts[number + 1] - starts[number], 0
        while depth < length:
            slot = _slot_of(tree, keys, keys[first + depth])
            if tree.table[slot] == 0:
                _add(tree, slot, count, (first, depth, length))
                count += 1
                break
            span = tree.spans[tree.table[slot] - 1]
            if span.start != depth:
                return NOT_CHAINED
            end = end_of_match(keys, first, span.base, depth, min(span.end, length))
            if end < span.end:
                _add(tree, _slot_of(tree, keys, keys[span.base + end]), count, (span.base, end, span.end))
                span.end = end
                count += 1
            depth = end
    return count


@entry
def trace_paths(tree: Tree, keys: Keys, starts: Places, path_starts: Places, paths: Ints) -> int:
    """Write each chain's spans, root first, to ``paths``, number r from ``path_starts[r]`` on, as far as there is room;
    returns how much it takes."""
    size = 0
    for number in range(len(starts) - 1):
        path_starts[number] = size
        depth, length = 0, starts[number + 1] - starts[number]
        while depth < length:
            span = tree.table[_slot_of(tree, keys, keys[starts[number] + depth])] - 1
            if size < len(paths):
                paths[size] = span
            size += 1
            depth = tree.spans[span].end
    path_starts[len(starts) - 1] = size
    return size


@kernel
def _add(tree: Tree, slot: np.int64, number: int, of: tuple[int, int, int]) -> None:
    span = tree.spans[number]
    span.base, span.start, span.end = of
    tree.table[slot] = number + 1


@kernel
def _slot_of(tree: Tree, keys: Keys, key: np.uint64) -> np.int64:
    """Where the span that begins with ``key`` is, or would be."""
    table, spans = tree.table, tree.spans
    slot = first_slot(key, len(table))
    while table[slot] != 0:
        span = spans[table[slot] - 1]
        if keys[span.base + span.start] == key:
            break
        slot = (slot + np.int64(1)) & np.int64(len(table) - 1)
    return slot
