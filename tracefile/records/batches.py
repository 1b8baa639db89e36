"""Batches of records with their fields as arrays, for passes over millions of records."""

import gc
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tracefile.records.arrays import BoolArray, FloatArray, IntArray
from tracefile.records.decoding import RecordColumns
from tracefile.records.schema import Record

NO_LIST = -1
"""Length of an absent list."""


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable cyclic garbage collection while millions of objects are created: it takes a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Hashes(NamedTuple):
    """Hash chains of a batch, concatenated: the prompt of each request, then its output."""

    values: npt.NDArray[np.uint64]
    """Larger and negative numbers are reduced to their low 64 bits."""
    starts: IntArray
    """Index in ``values`` of each request's first hash."""
    prompt_blocks: IntArray
    """Length of ``block_hashes`` of each record; NO_LIST: null."""
    output_blocks: IntArray
    """Length of ``output_block_hashes`` of each record; NO_LIST: null."""


class Batch:
    """Consecutive records of a trace."""

    def __init__(self, records: list[Record] | RecordColumns) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def column(self, name: str) -> Sequence[Any]:
        """Return a field of every record."""
        records = self.records
        return list(map(attrgetter(name), records)) if isinstance(records, list) else records.column(name)

    def numbers(self, name: str, missing: int = 0) -> IntArray:
        """Return an integer field of every record; ``missing`` stands for null."""
        column = self.column(name)
        if column.count(None) == len(column):
            return np.full(len(column), missing)
        return np.array([missing if value is None else value for value in column], np.int64)

    def times(self, name: str) -> FloatArray:
        """Return a float field of every record; NaN stands for null."""
        column = self.column(name)
        return np.full(len(column), np.nan) if column.count(None) == len(column) else np.array(column, np.float64)

    def equal(self, name: str, value: str) -> BoolArray:
        """Return a mask of the records whose field equals ``value``."""
        column = self.column(name)
        if column.count(value) == len(column):
            return np.ones(len(column), bool)
        return np.array([each == value for each in column], bool)

    def count(self, name: str) -> int:
        """Count the records whose field is not null."""
        return len(self) - self.column(name).count(None)

    def lengths(self, name: str) -> IntArray:
        """Return the lengths of a list field of every record."""
        return np.array(list(map(len, self.column(name))), np.int64)

    def values(self, name: str) -> FloatArray:
        """Return the values of a numeric list field, concatenated over all records."""
        lists = self.column(name)
        if all(values.count(1) == len(values) for values in lists):  # the common case: one token per read
            return np.ones(sum(map(len, lists)))
        return np.fromiter(chain.from_iterable(lists), np.float64)

    def hashes(self) -> Hashes:
        """Return the hash chains of all records."""
        return _joined_chains(self.column("block_hashes"), self.column("output_block_hashes"))

    def record(self, row: int) -> Record:
        """Return a copy of the record of a row."""
        return copy(self.records[row]) if isinstance(self.records, list) else self.records.record(row)


def _joined_chains(prompts: Sequence[Sequence[int] | None], outputs: Sequence[Sequence[int] | None]) -> Hashes:
    every = list(chain.from_iterable(filter(None, chain.from_iterable(zip(prompts, outputs, strict=True)))))
    try:
        values = array("Q", every)
    except OverflowError:  # hashes of another tool: negative, or above 64 bits
        values = array("Q", [number % 2**64 for number in every])
    counts = [
        np.array([NO_LIST if hashes is None else len(hashes) for hashes in lists], np.int64)
        for lists in (prompts, outputs)
    ]
    ends = np.cumsum(np.maximum(counts[0], 0) + np.maximum(counts[1], 0))
    return Hashes(np.asarray(values), np.append(0, ends)[:-1], *counts)
